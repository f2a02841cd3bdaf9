"""The form that a request gives its answer: OpenAI's `response_format`, and vLLM's words for it.

Goes in: a decoded request.  Comes out: one `Format`, None for free text, or a 400 LoradError that
names the parameter.  Whether a schema or grammar can be followed is not known here: that takes the
tokenizer, and `service/guides.py`.
"""

import msgspec
from msgspec import Raw

from lorad.api.body import decode
from lorad.config_sections import Limits
from lorad.errors import LoradError
from lorad.service.ask import Format, FormatKind
from lorad.wire_openai import GenerateRequest, ResponseFormat, StructuredOutputs


def wanted(request: GenerateRequest, limits: Limits) -> Format | None:
    """The one form that is asked for."""
    given = [
        *_of_response(request.response_format),
        *_of_guided(request),
        *_of_structured(request.structured_outputs),
    ]
    if not given:
        return None
    if len(given) > 1:
        first, second = given[0].param, given[1].param
        raise _invalid(second, f"contradicts {first}; give one of them")
    return checked(given[0], request, limits)


def checked(asked: Format, request: GenerateRequest, limits: Limits) -> Format:
    """What can be seen of it without the tokenizer."""
    if request.ignore_eos:
        raise _invalid("ignore_eos", f"contradicts {asked.param}: the answer ends with its format")
    size = len(asked.text.encode("utf-8", "surrogatepass"))
    if size > limits.schema_bytes:
        rule = f"has {size} bytes; limits.schema_bytes takes {limits.schema_bytes}"
        raise _invalid(asked.param, rule)
    return _checked(asked, limits)


def _of_response(response: ResponseFormat | None) -> list[Format]:
    if response is None or response.type == "text":
        return []
    if response.type == "json_object":
        return [Format("json_object", "", "response_format")]
    if response.json_schema is None:
        raise _invalid("response_format.json_schema", "is required")
    schema = bytes(response.json_schema.schema).decode()
    return [Format("json_schema", schema, "response_format.json_schema.schema")]


def _of_guided(request: GenerateRequest) -> list[Format]:
    found = _json(request.guided_json, "guided_json")
    return found + _texts(
        "guided_", request.guided_regex, request.guided_choice, request.guided_grammar
    )


def _of_structured(given: StructuredOutputs | None) -> list[Format]:
    if given is None:
        return []
    at = "structured_outputs."
    found = _json(given.json, at + "json")
    if given.json_object:
        found.append(Format("json_object", "", at + "json_object"))
    return found + _texts(at, given.regex, given.choice, given.grammar)


def _json(raw: Raw, param: str) -> list[Format]:
    """vLLM takes a schema as an object, or as text that holds one."""
    data = bytes(raw)
    if data in (b"", b"null"):
        return []
    text = msgspec.json.decode(data, type=str) if data[:1] == b'"' else data.decode()
    return [Format("json_schema", text, param)]


def _texts(
    at: str, regex: str | None, choice: tuple[str, ...] | None, grammar: str | None
) -> list[Format]:
    found = []
    if regex is not None:
        found.append(Format("regex", regex, at + "regex"))
    if choice is not None:
        if not choice:
            raise _invalid(at + "choice", "must name at least one text")
        found.append(Format("choice", msgspec.json.encode(choice).decode(), at + "choice"))
    if grammar is not None:
        found.append(Format("grammar", grammar, at + "grammar"))
    return found


def _checked(asked: Format, limits: Limits) -> Format:
    """A schema is a JSON object; a text says something."""
    kind: FormatKind = asked.kind
    if kind == "json_schema":
        try:
            schema = decode(asked.text.encode(), object, max_depth=limits.json_depth)
        except (LoradError, UnicodeEncodeError) as error:
            raise _invalid(asked.param, f"is no JSON schema: {error}") from None
        if not isinstance(schema, dict):
            raise _invalid(asked.param, "must be a JSON object")
    elif kind != "json_object" and not asked.text:
        raise _invalid(asked.param, "must not be empty")
    return asked


def _invalid(param: str, rule: str) -> LoradError:
    return LoradError("invalid_value", f"{param} {rule}", param=param)
