"""A model of the HuggingFace hub: its files in the hub's local cache, downloaded where they are not there yet."""

from pathlib import Path

from compilerllm.kernels.launch.errors import NotOnHub

_DESCRIPTIONS = ["*.json", "*.jinja", "*.txt", "*.model"]  # what compiling and serving read beside weights


def download(name: str, revision: str | None = None, weights: bool = True) -> Path:
    """The folder of model ``org/name``, or what is in it but for the weights.

    Raises ``NotOnHub`` where the hub does not give it, saying what to do.
    """
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    patterns = [*_DESCRIPTIONS, *(["*.safetensors"] if weights else [])]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except GatedRepoError as error:
        raise NotOnHub(
            f"{name} needs its licence accepted on the hub, and HF_TOKEN set to a token of yours"
        ) from error
    except RepositoryNotFoundError as error:
        raise NotOnHub(
            f"{name} is no folder here and no model on the hub (or a private one: set HF_TOKEN)"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, httpx.HTTPError, OSError, ValueError) as error:
        raise NotOnHub(
            f"{name} is no folder here, is not in the hub's local cache, and the hub cannot be reached "
            f"({type(error).__name__}); give a local folder, or connect and try again"
        ) from error
