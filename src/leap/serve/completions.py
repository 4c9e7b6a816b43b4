"""OpenAI's completions protocol: what may be asked, checked, and the form of the answers."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from leap.errors import InputError
from leap.serve.engine import Chosen, Done
from leap.serve.errors import ApiError
from leap.serve.sampling import Sampling

PASSED_OVER = ("user", "metadata", "store")
"""Settings that change nothing here."""
REFUSED = {
    "suffix": "text is written from left to right",
    "echo": "a reply holds what was written alone",
    "presence_penalty": "tokens are drawn as the model has them",
    "frequency_penalty": "tokens are drawn as the model has them",
    "logit_bias": "tokens are drawn as the model has them",
}
"""Settings that there are none of, but for the value that changes nothing, and why."""
MOST_STOPS = 4
MOST_LIKELIEST = 5


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one request may ask for."""

    max_tokens: int = 4096
    """Tokens of a reply."""
    max_prompt: int = 65536
    """Tokens of a prompt."""
    max_choices: int = 16
    """Replies to one request."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request for completions, all of it checked but for tokens."""

    prompts: list[str | list[int]]
    model: str | None = None
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 16
    n: int = 1
    stops: list[str] = field(default_factory=list)
    stream: bool = False
    usage_in_stream: bool = False
    log_probabilities: int | None = None
    state: str | None = None


def read_request(body: Any, limits: Limits) -> Asked:
    """A request from the body that came."""
    if not isinstance(body, dict):
        raise ApiError(f"the body is {_kind(body)}; send an object of JSON, as {{'prompt': 'A'}}")
    given = {name: value for name, value in body.items() if value is not None}
    known = {
        *("model", "prompt", "max_tokens", "temperature", "top_p", "n", "best_of", "seed"),
        *("stop", "stream", "stream_options", "logprobs", "state", *PASSED_OVER, *REFUSED),
    }
    for name in given:
        if name not in known:
            raise ApiError(f"there is no setting {name!r:.60}; drop it", param=str(name)[:60])
    for name, why in REFUSED.items():
        if given.get(name):
            raise ApiError(f"{name} is not possible here, as {why}; drop it", param=name)
    max_tokens = _integer(given, "max_tokens", 16, 1, limits.max_tokens)
    n = _integer(given, "n", 1, 1, limits.max_choices)
    if _integer(given, "best_of", n, 1) != n:
        raise ApiError("best_of is not possible here but for n; drop it", param="best_of")
    state = given.get("state")
    if state is not None and not isinstance(state, str):
        raise ApiError(f"state is {_kind(state)}; give the id of a reply's state", param="state")
    prompts = _prompts(given.get("prompt", ""))
    if len(prompts) * n > limits.max_choices:
        raise ApiError(
            f"{len(prompts)} prompts with n={n} replies are more than the {limits.max_choices} of "
            "a request; send several",
            param="prompt",
        )
    options = given.get("stream_options", {})
    if not isinstance(options, dict):
        raise ApiError(
            f"stream_options is {_kind(options)}; give an object", param="stream_options"
        )
    try:
        sampling = Sampling(
            temperature=_number(given, "temperature", 1.0),
            top_p=_number(given, "top_p", 1.0),
            seed=None if "seed" not in given else _integer(given, "seed", 0),
        )
    except InputError as error:
        raise ApiError(str(error), param=str(error).partition("=")[0]) from error
    return Asked(
        prompts=prompts,
        model=_text(given, "model"),
        sampling=sampling,
        max_tokens=max_tokens,
        n=n,
        stops=_stops(given.get("stop", [])),
        stream=_flag(given, "stream"),
        usage_in_stream=_flag(options, "include_usage"),
        log_probabilities=(
            None if "logprobs" not in given else _integer(given, "logprobs", 0, 0, MOST_LIKELIEST)
        ),
        state=state,
    )


@dataclass
class Choice:
    """One reply as it comes together."""

    index: int
    text: str = ""
    chosen: list[Chosen] = field(default_factory=list)
    done: Done | None = None

    def form(self, spell: Any = None) -> dict[str, Any]:
        """As the protocol has it; the state is ours."""
        return {
            "index": self.index,
            "text": self.text,
            "logprobs": _logprobs(self.chosen, spell) if self.chosen else None,
            "finish_reason": None if self.done is None else self.done.reason,
            **({} if self.done is None else {"state": self.done.state}),
        }


def completion(
    name: str, model: str, choices: Sequence[dict[str, Any]], usage: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A reply, or a part of one."""
    return {
        "id": name,
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": list(choices),
        **({} if usage is None else {"usage": usage}),
    }


def usage(done: Sequence[Done]) -> dict[str, Any]:
    """Tokens read and written."""
    prompt, written = sum(each.n_prompt for each in done), sum(each.n_written for each in done)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": sum(each.n_shared for each in done)},
    }


def _logprobs(chosen: Sequence[Chosen], spell: Any) -> dict[str, Any]:
    return {
        "tokens": [each.spelled for each in chosen],
        "token_logprobs": [each.log_probability for each in chosen],
        "top_logprobs": [{spell(token): p for token, p in each.likeliest} for each in chosen],
        "text_offset": [each.offset for each in chosen],
    }


def _prompts(given: Any) -> list[str | list[int]]:
    """One prompt or several, each a text or tokens."""
    if isinstance(given, str):
        return [given]
    if isinstance(given, list) and given:
        if _are_tokens(given):
            return [given]
        if all(isinstance(each, str) or (each and _are_tokens(each)) for each in given):
            return given
    raise ApiError("prompt must be text, tokens, or a list of either", param="prompt")


def _are_tokens(given: Any) -> bool:
    return isinstance(given, list) and all(type(token) is int for token in given)


def _stops(given: Any) -> list[str]:
    stops = [given] if isinstance(given, str) else given
    if not isinstance(stops, list) or not all(isinstance(x, str) and x for x in stops):
        raise ApiError("stop must be text, or a list of texts, none of them empty", param="stop")
    if len(stops) > MOST_STOPS:
        raise ApiError(f"{len(stops)} stop strings are more than {MOST_STOPS}", param="stop")
    return stops


def _integer(
    given: Mapping[str, Any], name: str, default: int, least: int | None = None,
    most: int | None = None,
) -> int:  # fmt: skip
    value = given.get(name, default)
    if type(value) is not int:
        raise ApiError(f"{name} is {_kind(value)}; give a whole number", param=name)
    if (least is not None and value < least) or (most is not None and value > most):
        bounds = f"{least} or more" if most is None else f"from {least} to {most}"
        raise ApiError(f"{name}={value!s:.40} must be {bounds}", param=name)
    return value


def _number(given: Mapping[str, Any], name: str, default: float) -> float:
    value = given.get(name, default)
    if type(value) not in (int, float):
        raise ApiError(f"{name} is {_kind(value)}; give a number", param=name)
    try:
        return float(value)
    except OverflowError as error:
        raise ApiError(f"{name} is too large; give a smaller number", param=name) from error


def _flag(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise ApiError(f"{name} is {_kind(value)}; give true or false", param=name)
    return value


def _text(given: Mapping[str, Any], name: str) -> str | None:
    value = given.get(name)
    if value is not None and not isinstance(value, str):
        raise ApiError(f"{name} is {_kind(value)}; give text", param=name)
    return value


def _kind(value: Any) -> str:
    """What JSON calls it."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false"}
    return names.get(type(value), "null" if value is None else "a number")
