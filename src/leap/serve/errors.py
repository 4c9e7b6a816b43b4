"""What a server answers that cannot do what was asked, in OpenAI's form."""

from typing import Any

from leap.errors import LeapError


class ApiError(LeapError):
    """An answer in place of what was asked for.

    Args:
        message: one sentence.
        status: of HTTP.
        code: a word for programs.
        param: the setting that is wrong.
        seconds: when to try again, if that may help.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str | None = None,
        param: str | None = None,
        seconds: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.seconds = status, code, param, seconds

    @property
    def body(self) -> dict[str, Any]:
        """As OpenAI's clients read it."""
        kind = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        general = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": _spelled(str(self)),
                "type": kind.get(self.status, general),
                "param": None if self.param is None else _spelled(self.param),
                "code": self.code,
            }
        }

    @property
    def headers(self) -> dict[str, str]:
        """When to try again."""
        return {} if self.seconds is None else {"Retry-After": str(self.seconds)}


def _spelled(text: str) -> str:
    """The text without half characters, which JSON may bring and UTF-8 does not know."""
    return text.encode("utf-8", "replace").decode()
