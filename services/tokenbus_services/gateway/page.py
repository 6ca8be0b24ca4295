"""The inspector's files, as the browser gets them: from here alone, and sent again only when they have changed."""

import mimetypes
from hashlib import sha256
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

from tokenbus_services.gateway.errors import ApiError

_HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_INDEX = "index.html"
_KINDS = {
    ".js": "text/javascript; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}


class Page:
    """The files, read once."""

    def __init__(self) -> None:
        """Read them."""
        folder = files("tokenbus_services.gateway").joinpath("page")
        self._files: dict[str, tuple[bytes, str, str]] = {}
        for file in folder.iterdir() if folder.is_dir() else ():
            if file.is_file():
                data = file.read_bytes()
                suffix = "." + file.name.rpartition(".")[2]
                kind = _KINDS.get(suffix) or mimetypes.guess_type(file.name)[0] or "application/octet-stream"
                self._files[file.name] = data, kind, f'"{sha256(data).hexdigest()[:32]}"'

    def answer(self, request: Request) -> Response:
        """Return the file that is asked for, or say that the browser has it."""
        name = request.path_params.get("name", _INDEX)
        found = self._files.get(name)
        if found is None:
            raise ApiError(404, f"there is no page {request.url.path}", code="not_found")
        data, kind, tag = found
        headers = _HEADERS | {"etag": tag}
        known = {each.strip().removeprefix("W/") for each in request.headers.get("if-none-match", "").split(",")}
        if tag in known:
            return Response(status_code=304, headers=headers)
        return Response(data, headers=headers | {"content-type": kind})
