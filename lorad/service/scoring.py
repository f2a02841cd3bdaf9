"""How two texts are scored by the model that is there, and what becomes of its results.

Goes in: a `ScoreAsk`, what the model can do, and later its results.  Comes out: a `PoolAsk` for
them, then scores.  A model with a head of one class reads both texts together; others give a vector
for each text, or where their files name MaxSim one for each token.  Knows no engine.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from engine.pooling.config import PoolingInfo
from engine.pooling.requests import PoolResult
from engine.pooling.spec import PoolingSpec
from lorad.errors import LoradError
from lorad.service import similarity
from lorad.service.pool_ask import Answered, Input, PoolAsk, ScoreAsk, Scored, Scoring
from lorad.text.pooling import Role

Compare = Callable[[similarity.Floats, similarity.Floats], float]


@dataclass(frozen=True, slots=True)
class Model:
    """`tasks` are what the base is served for; `own` has the classes of the adapter's head, where
    it brings one: then it was trained for them."""

    info: PoolingInfo
    spec: PoolingSpec
    tasks: tuple[str, ...]
    own: tuple[str, ...] = ()
    instructed: bool = False  # pairs are put into a text that has room for an instruction

    @property
    def labels(self) -> tuple[str, ...]:
        """Of the head that answers; () = there is none, or it names nothing."""
        return self.own or self.info.labels

    @property
    def num_labels(self) -> int:
        """Of the head that answers; 0 = there is none."""
        served = "rerank" in self.tasks or "classify" in self.tasks
        return len(self.own) or (self.info.num_labels if served else 0)

    @property
    def embeds(self) -> bool:
        """Are its vectors what anybody trained?"""
        return "embed" in self.tasks

    @property
    def scoring(self) -> Scoring:
        """What fits it.  A head of several classes says which class a text is of, not how well two
        of them match: then it is asked for by name."""
        if self.num_labels:
            return "head"
        return "maxsim" if self.spec.similarity.lower() == "maxsim" else "vectors"

    def check(self, ask: PoolAsk) -> None:
        """Raises unsupported_parameter for what it has no head for, and invalid_value for
        dimensions that it does not have, or a text of which it has to know what it is."""
        if ask.task == "classify" and not self.num_labels:
            hint = "POST /v1/embeddings gives its vectors, /pooling those of tokens"
            message = "this model has no classifier: it makes vectors"
            raise LoradError("unsupported_parameter", message, param="model", hint=hint)
        if ask.task == "classify" and not self.own and self.info.score_tokens:
            self._check_pairs(ask)
        if ask.task != "classify":
            self.check_vectors("model")
        if ask.task == "embed":
            self.check_pooled("model")
        if self.spec.late:
            self._check_roles(ask)
        if ask.dimensions is None:
            return
        known, width = self.spec.dimensions, self.info.width
        if ask.task == "embed" and known and ask.dimensions not in (*known, width):
            listed = ", ".join(map(str, known))
            message = f"dimensions = {ask.dimensions}: the model was trained for {listed}"
        elif not 1 <= ask.dimensions <= width:
            message = f"dimensions = {ask.dimensions}: a vector has {width} numbers"
        else:
            return
        raise LoradError("invalid_value", message, param="dimensions")

    def check_pooled(self, param: str) -> None:
        """Raises unsupported_parameter where nobody trained it to make one vector of a text."""
        if self.spec.late:
            message = "this model makes a vector for each token, and none for a text"
            hint = "POST /pooling for them, /v1/score or /v1/rerank to compare texts by MaxSim"
            raise LoradError("unsupported_parameter", message, param=param, hint=hint)

    def _check_roles(self, ask: PoolAsk) -> None:
        texts = (one for one in ask.inputs if isinstance(one.text, str))  # ids have their marks
        if ask.task == "tokens" and any(one.role is None for one in texts):
            message = "this model reads a query in another way than a document"
            hint = 'send input_type = "query" or "document"'
            raise LoradError("invalid_value", message, param="input_type", hint=hint)

    def _check_pairs(self, ask: PoolAsk) -> None:
        """Words of an answer score what was asked for one: nothing was asked of a text alone."""
        texts = (one for one in ask.inputs if isinstance(one.text, str))  # ids may be of a pair
        alone = next((one for one in texts if one.second is None), None)
        if alone is not None:
            message = "this model says how well two texts fit, and tells no classes of one"
            hint = "POST /v1/rerank or /v1/score"
            raise LoradError("unsupported_parameter", message, param="model", hint=hint)

    def check_vectors(self, param: str) -> None:
        """Raises unsupported_parameter where it is not served for them: pooling what nobody trained
        would give numbers, and no meaning."""
        if not self.embeds:
            does = " and ".join(task for task in ("rerank", "classify") if task in self.tasks)
            message = f"this model is served to {does}, and makes no vectors"
            hint = 'models.tasks has "embed" for a model that was trained to'
            raise LoradError("unsupported_parameter", message, param=param, hint=hint)


class Compared:
    """Scores of second texts as their vectors come: those of 1,000 documents' tokens are more than
    anybody should hold.  A second comes before its first now and then, and waits."""

    def __init__(self, num_firsts: int, compare: Compare) -> None:
        self.scores: dict[int, float] = {}  # by the number of the second
        self._num, self._compare = num_firsts, compare
        self._firsts: dict[int, similarity.Floats] = {}
        self._early: list[tuple[int, similarity.Floats]] = []

    def take(self, number: int, result: PoolResult) -> PoolResult:
        """Of the input of this number, firsts ahead of seconds; what is left of it to keep."""
        assert result.values is not None
        if number < self._num:
            self._firsts[number] = result.values
            early, self._early = self._early, []
            for second, values in early:
                self._hold(second, values)
        else:
            self._hold(number - self._num, result.values)
        return replace(result, values=None)

    def _hold(self, second: int, values: similarity.Floats) -> None:
        first = self._firsts.get(0 if self._num == 1 else second)
        if first is None:
            self._early.append((second, values))
        else:
            self.scores[second] = self._compare(first, values)


@dataclass(frozen=True, slots=True)
class Planned:
    """`compared` holds results against each other as they come; None: each has its own score."""

    ask: PoolAsk
    how: Scoring
    compared: Compared | None = None


def plan(ask: ScoreAsk, model: Model) -> Planned:
    """What to ask the model.  Raises unsupported_parameter for what it cannot do."""
    how = ask.scoring or model.scoring
    if how == "head":
        _check_head(ask, model)
        return Planned(_pairs(ask, instructed=model.instructed), how)
    if ask.raw:
        message = "raw_scores are of a head, and this model has none: it compares vectors"
        raise LoradError("unsupported_parameter", message, param="raw_scores")
    model.check_vectors("model" if ask.scoring is None else "scoring")
    if how == "maxsim":
        known = ask.ranks or model.spec.late is not None
        compared = Compared(len(ask.firsts), similarity.maxsim)
        return Planned(_singles(ask, tokens=True, ranks=known), how, compared)
    model.check_pooled("model" if ask.scoring is None else "scoring")
    compare = similarity.BY_NAME.get(model.spec.similarity.lower(), similarity.cosine)
    compared = Compared(len(ask.firsts), compare)
    return Planned(_singles(ask, tokens=False, ranks=ask.ranks), how, compared)


def score(ask: ScoreAsk, planned: Planned, answered: Answered) -> Scored:
    """From the results of what was planned."""
    results = answered.results
    if planned.compared is None:
        scores = [_first(r, raw=ask.raw) for r in results]
        keys = [_first(r, raw=True) for r in results]  # scores may be equal where these are not
    else:
        keys = scores = [planned.compared.scores[i] for i in range(len(ask.seconds))]
    order = sorted(range(len(scores)), key=lambda i: -keys[i])
    return Scored(tuple(scores), tuple(order), planned.how, answered)


def _check_head(ask: ScoreAsk, model: Model) -> None:
    if model.num_labels == 1:
        return
    if model.num_labels:
        names = ", ".join(model.labels)
        message = f"this model tells {model.num_labels} classes apart ({names}), it scores no pairs"
        hint = "POST /classify" + (', or scoring = "cosine"' if model.embeds else "")
    else:
        message, hint = "this model has no head that scores pairs", 'scoring = "cosine" or "maxsim"'
    param = "model" if ask.scoring is None else "scoring"
    raise LoradError("unsupported_parameter", message, param=param, hint=hint)


def _pairs(ask: ScoreAsk, *, instructed: bool) -> PoolAsk:
    if ask.instruction and not instructed:
        message = "this model reads two texts together, and takes no instruction for it"
        raise LoradError("unsupported_parameter", message, param="instruction")
    firsts = ask.firsts * (len(ask.seconds) if len(ask.firsts) == 1 else 1)
    inputs = tuple(
        Input(one, two, _param(ask, 1, i))
        for i, (one, two) in enumerate(zip(firsts, ask.seconds, strict=True))
    )
    return PoolAsk(wish=ask.wish, task="classify", inputs=inputs, instruction=ask.instruction)


def _singles(ask: ScoreAsk, *, tokens: bool, ranks: bool) -> PoolAsk:
    roles: tuple[Role | None, Role | None] = ("query", "document") if ranks else (None, None)
    inputs = tuple(
        Input(text, None, _param(ask, side, i), roles[side])
        for side, texts in enumerate((ask.firsts, ask.seconds))
        for i, text in enumerate(texts)
    )
    return PoolAsk(
        wish=ask.wish,
        task="tokens" if tokens else "embed",
        inputs=inputs,
        normalize=True if tokens else None,
        instruction=ask.instruction,
        num_kept=len(ask.firsts),
    )


def _param(ask: ScoreAsk, side: int, index: int) -> str:
    name, count = ask.params[side], len((ask.firsts, ask.seconds)[side])
    return name if count == 1 and side == 0 else f"{name}[{index}]"


def _first(result: PoolResult, *, raw: bool) -> float:
    values = result.logits if raw else result.values
    assert values is not None, "a classifier tells both"
    return float(values[0])
