"""The Hugging Face hub: models are downloaded from it, or found in its cache on this machine."""

from contextlib import suppress
from pathlib import Path

from cetane.checkpoint.convert_tokenizer import SOURCES
from cetane.checkpoint.safetensors_files import refuse_pickle
from cetane.checkpoint.tokenizer_files import TEMPLATE_FILES
from cetane.errors import CetaneError


def download(repo_id: str) -> Path:
    """The local folder of a hub model. A download that was cut off continues where it stopped."""
    # Imported here: a local checkpoint should not pay for the hub's client.
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            repo_id,
            allow_patterns=["*.json", "*.safetensors", *SOURCES, *TEMPLATE_FILES.values()],
            # Other exports of the same weights. A star also stands for folders.
            ignore_patterns=["*/*.json", "*/*.safetensors", "consolidated*"],
        )
    except Exception as error:  # the network, the hub and its HTTP client raise many kinds
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CetaneError(
            f"cannot get {repo_id} from the Hugging Face hub, and no such path exists: {reason}",
            "check the name, the network and, for gated models, `hf auth login`",
        ) from error
    if not any(Path(folder).glob("*.safetensors")):
        names = names_in(repo_id)
        refuse_pickle(Path(repo_id, name) for name in names)
        files = [name for name in names if name.endswith(".gguf")]
        if files:
            raise CetaneError(
                f"{repo_id} holds GGUF files, and no safetensors",
                f"hf download {repo_id} {files[0]} --local-dir . , then give that file",
            )
    return Path(folder)


def downloaded(repo_id: str, revision: str | None = None) -> Path:
    """The folder of a hub model in the hub's cache on this machine. Nothing is asked of the hub.

    CetaneError if it is not there."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo_id, revision=revision, local_files_only=True))
    except Exception as error:  # the client raises many kinds
        raise CetaneError(
            f"{repo_id} is not in this machine's cache of the Hugging Face hub"
        ) from error


def names_in(repo_id: str) -> list[str]:
    """The files of a hub model, if the hub answers. They only make an error message better."""
    from huggingface_hub import list_repo_files

    with suppress(Exception):
        return sorted(list_repo_files(repo_id))
    return []
