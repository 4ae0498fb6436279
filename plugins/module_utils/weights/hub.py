"""What a repository holds at a commit, asked of any server that speaks the Hugging Face Hub's protocol.

Only questions of a few kilobytes are asked here, so that what is refused is known, and said, before a client starts to
transfer for hours. The routes are those of the Hub's own API: `/api/models/ID/revision/R`, `/api/models/ID/tree/R`
(paged by `Link`), and `/ID/resolve/R/FILE`, whose errors carry an `X-Error-Code`.
"""

from __future__ import annotations

import http.client
import json
import re
import ssl
import urllib.error
import urllib.request
from typing import Any, Iterable, Iterator, Mapping, NoReturn, Optional
from urllib.parse import quote, urljoin, urlsplit

from .files import COMMIT, Wanted, WeightsError, excluded, safe_name

TIMEOUT_SECONDS = 30.0
_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
_NEXT_PAGE = re.compile(r'<([^>]+)>\s*;\s*rel="?next"?')
_MAX_ANSWER_BYTES = 64 * 1024 * 1024
_MAX_PAGES = 1000
_MAX_WAIT_SECONDS = 300.0


class PassingError(Exception):
    """The server could not answer now; asking again later may help.

    Attributes:
        wait_seconds: How long it asked to be left alone, 0 when it did not say.
    """

    def __init__(self, message: str, wait_seconds: float = 0.0) -> None:
        """Keep the wait beside the message."""
        super().__init__(message)
        self.wait_seconds = wait_seconds


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Takes a redirect for the answer."""

    def redirect_request(self, *_: Any) -> None:
        return None


class Hub:
    """A server that speaks the Hub's protocol.

    Attributes:
        endpoint: `https://HOST` or `http://HOST[:PORT][/PATH]`.
    """

    def __init__(self, endpoint: str, token: Optional[str] = None) -> None:
        """Keep the address, and the token where nothing prints it."""
        self.endpoint = endpoint.rstrip("/")
        self._token = token or None

    def commit(self, repository: str, revision: str) -> str:
        """Return the commit that a branch, tag or commit of a repository is now."""
        answer, _ = self._json(
            f"{self.endpoint}/api/models/{repository}/revision/{quote(revision, safe='')}", repository, revision
        )
        sha = answer.get("sha") if isinstance(answer, dict) else None
        if not isinstance(sha, str) or not COMMIT.fullmatch(sha):
            raise WeightsError(
                f"{self.endpoint} names no commit for {repository} at {revision}, so it is no Hugging Face Hub. Check "
                "model_weights_endpoint."
            )
        return sha

    def listing(self, repository: str, commit: str, exclude: Iterable[str] = ()) -> dict[str, Wanted]:
        """Return what every file of a repository must be at a commit, without those that match `exclude`."""
        wanted: dict[str, Wanted] = {}
        for entry in self._tree(repository, commit):
            name = entry["path"]
            if not safe_name(name):
                raise WeightsError(
                    f"{repository} at {commit} holds a file named {name!r}, which would land outside of its folder or "
                    "among our own files. Nothing was downloaded. Use another repository, and tell its publisher."
                )
            if not excluded(name, exclude):
                lfs = entry.get("lfs")
                wanted[name] = (
                    Wanted(int(lfs["size"]), sha256=lfs["oid"]) if lfs else Wanted(entry["size"], git_sha1=entry["oid"])
                )
        if not wanted:
            raise WeightsError(f"{repository} at {commit} holds no files. Check model_weights_id and the commit.")
        return wanted

    def require(self, repository: str, commit: str, name: str) -> None:
        """Require that the server gives out a file: a gated repository lists its files to anyone.

        Raises:
            WeightsError: It refuses, or has no such file.
            PassingError: It does not answer now.
        """
        url = f"{self.endpoint}/{repository}/resolve/{commit}/{quote(name)}"
        self._open(url, repository, commit, name=name, method="HEAD", redirects=False)

    def _tree(self, repository: str, commit: str) -> Iterator[Mapping[str, Any]]:
        url = f"{self.endpoint}/api/models/{repository}/tree/{commit}?recursive=true&expand=false"
        for _ in range(_MAX_PAGES):
            page, headers = self._json(url, repository, commit)
            try:
                yield from (entry for entry in page if entry["type"] == "file")
            except (TypeError, KeyError):
                raise WeightsError(
                    f"{self.endpoint} lists the files of {repository} in a form that is not the Hub's. Check "
                    "model_weights_endpoint."
                ) from None
            following = _NEXT_PAGE.search(headers.get("Link", ""))
            if following is None:
                return
            url = urljoin(url, following[1])

    def _json(self, url: str, repository: str, revision: str) -> tuple[Any, Mapping[str, str]]:
        headers, body = self._open(url, repository, revision)
        try:
            return json.loads(body), headers
        except ValueError:
            raise WeightsError(
                f"{urlsplit(url).netloc} answered something else than JSON for {repository}, as a proxy's or a sign-in "
                "page does. Check model_weights_endpoint and the proxy in vllm_fleet_environment."
            ) from None

    def _open(
        self, url: str, repository: str, revision: str, *, name: str = "", method: str = "GET", redirects: bool = True
    ) -> tuple[Mapping[str, str], bytes]:
        request = urllib.request.Request(url, method=method, headers={"User-Agent": "vllm-fleet"})  # noqa: S310  below
        if urlsplit(url).scheme not in ("http", "https"):
            raise WeightsError(f"model_weights_endpoint: {self.endpoint} is not an http or https address.")
        if self._token and urlsplit(url)[:2] == urlsplit(self.endpoint)[:2]:
            # Unredirected: a redirect leads to other servers, and the token is for this one.
            request.add_unredirected_header("Authorization", f"Bearer {self._token}")
        opener = urllib.request.build_opener(*([] if redirects else [_NoRedirects]))
        try:
            with opener.open(request, timeout=TIMEOUT_SECONDS) as answer:
                return dict(answer.headers.items()), answer.read(_MAX_ANSWER_BYTES)
        except urllib.error.HTTPError as error:
            with error:
                if error.code // 100 == 3:  # noqa: PLR2004  a redirect to where the content is: it is given out
                    return dict(error.headers.items()), b""
                self._refused(error, repository, revision, name)
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            if isinstance(reason, ssl.SSLCertVerificationError):
                raise WeightsError(
                    f"The certificate of {self.endpoint} is not trusted here: {reason.verify_message}. Where a proxy "
                    "signs with its own authority, install that on the host, or name its file as SSL_CERT_FILE in "
                    "vllm_fleet_environment."
                ) from None
            raise PassingError(f"{self.endpoint} does not answer: {reason or type(error).__name__}") from None

    def _refused(self, error: urllib.error.HTTPError, repository: str, revision: str, name: str) -> NoReturn:
        """Say what a refusal means and what to do."""
        code = error.headers.get("X-Error-Code", "")
        status = f"HTTP {error.code}{' ' + code if code else ''}"
        if error.code in _PASSING:
            raise PassingError(f"{self.endpoint} answered {status}", _wait(error.headers))
        key = "the token that was given" if self._token else "a request without a token"
        if code == "RevisionNotFound":
            text = (
                f"{repository} has no revision {revision} on {self.endpoint} ({status}). Take the commit from the "
                'repository\'s page, "Files and versions", and set it as revision in the card or as '
                "model_weights_revision."
            )
        elif code == "EntryNotFound" or (error.code == 404 and name):  # noqa: PLR2004
            text = (
                f"{repository} lists {name} at {revision}, but {self.endpoint} does not have it ({status}). A mirror "
                "may not be complete yet: wait for it, or set model_weights_endpoint to another."
            )
        elif code == "GatedRepo":
            text = (
                f"{repository} is gated, and {self.endpoint} does not give it out for {key} ({status}). Accept its "
                "terms on its page with the account that owns the token, and set model_weights_token (from a vault) or "
                "model_weights_token_file."
            )
        elif code == "RepoNotFound" or error.code in (401, 404):
            text = (
                f"{self.endpoint} shows no repository {repository} for {key} ({status}): it is misspelt, or private, "
                "or the token is not valid. Check model_weights_id, and for a private or gated repository set "
                "model_weights_token (from a vault) or model_weights_token_file."
            )
        else:
            text = (
                f"{self.endpoint} refuses {repository} at {revision} for {key} ({status}). Check "
                "model_weights_endpoint and the token's permissions."
            )
        raise WeightsError(text)


def _wait(headers: Any) -> float:
    """Seconds that the server asks to be left alone: Retry-After, or the Hub's `RateLimit: ...;t=SECONDS`; or 0."""
    asked = re.fullmatch(r"\s*(\d+)\s*", headers.get("Retry-After", "")) or re.search(
        r";\s*t=(\d+)", headers.get("RateLimit", "")
    )
    return min(float(asked[1]), _MAX_WAIT_SECONDS) if asked else 0.0
