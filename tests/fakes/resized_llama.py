"""What transformers says of a base that was resized and has an adapter's own rows and its weights.

Goes in: the base's folder, a packed adapter with the matrices that went into it, a prompt.  Comes
out: greedy tokens and log-probabilities, over the ids that the adapter's requests may draw.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_PARTS = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "self_attn")
_PARTS |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "mlp")


class Judge:
    """Models are made once for each adapter; None = the base."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._models: dict[str, Any] = {}

    def __call__(
        self, adapter: Any, prompt: list[int], count: int
    ) -> tuple[list[int], Tensor, Tensor]:
        """`count` greedy tokens, their log-probabilities, and those of the prompt's from its second
        on."""
        model, tokens, chosen = self._model(adapter), list(prompt), []
        limit = adapter.manifest.num_tokens if adapter is not None else 0
        limit = limit or model.config.vocab_size
        with torch.no_grad():
            for _ in range(count):
                rows = model(torch.tensor([tokens])).logits[0, :, :limit].log_softmax(-1)
                tokens.append(int(rows[-1].argmax()))
                chosen.append(rows[-1].max())
        prompted = rows[: len(prompt) - 1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        return tokens[len(prompt) :], torch.stack(chosen), prompted

    def check(self, story: Any, adapter: Any, prompt: list[int], within: float = 1e-4) -> None:
        """Whether a request's story is that, with all that it tells."""
        assert story.message == "" and story.tokens
        tokens, chosen, prompted = self(adapter, prompt, len(story.tokens))
        assert story.tokens == tokens
        told = torch.tensor([one.logprob for one in story.logprobs])
        torch.testing.assert_close(told, chosen, atol=within, rtol=within)
        if story.prompt_logprobs:
            told = torch.tensor([one.logprob for one in story.prompt_logprobs[1:]])
            torch.testing.assert_close(told, prompted, atol=within, rtol=within)

    def _model(self, adapter: Any) -> Any:
        from transformers import LlamaForCausalLM

        name = adapter.rev if adapter is not None else ""
        if name not in self._models:
            model = LlamaForCausalLM.from_pretrained(self._folder).eval()
            if adapter is not None:
                _apply(model, adapter)
            self._models[name] = model
        return self._models[name]


@torch.no_grad()
def _apply(model: Any, adapter: Any) -> None:
    manifest, size = adapter.manifest, model.config.vocab_size
    model.resize_token_embeddings(max(manifest.num_tokens, size), mean_resizing=False)
    told = {(m.layer, m.module): m for m in manifest.modules}
    for (layer, module), (a, b) in adapter.tensors.items():
        one = told[layer, module]
        if one.replaces:
            end = model.lm_head if "lm_head" in module else model.model.embed_tokens
            end.weight[list(one.tokens) if one.tokens else slice(None)] = a
        elif module in ("embed_tokens", "lm_head"):
            end = model.lm_head if module == "lm_head" else model.model.embed_tokens
            delta = one.scaling * (b @ a)
            end.weight += (delta if module == "lm_head" else delta.T)[: len(end.weight)]
        else:
            part = getattr(model.model.layers[layer], _PARTS[module])
            getattr(part, module).weight += one.scaling * (b @ a)


def own_prompt(adapter: Any, length: int, seed: int, size: int = 256) -> list[int]:
    """A random one, in which an adapter's own ids are as frequent as any."""
    draw = torch.Generator().manual_seed(seed)
    limit = adapter.manifest.num_tokens if adapter is not None else 0
    return torch.randint(3, limit or size, (length,), generator=draw).tolist()
