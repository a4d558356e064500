"""The upload of a saved model to the hub."""

from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, create_repo, upload_folder


def push_folder(folder: Path, repo_id: str, *, private: bool | None = None, **options: Any) -> CommitInfo:
    """Uploads a folder to a repository.

    Args:
        folder: uploads its files, except names that begin with `_`, such as a run's lock.
        repo_id: the repository, created where it does not exist.
        private: whether a created repository is private.
        options: more arguments of `huggingface_hub.upload_folder`.
    """
    repo_id = create_repo(repo_id, private=private, token=options.get("token"), exist_ok=True).repo_id
    defaults = {"commit_message": "Upload model", "ignore_patterns": ["_*"]}
    return upload_folder(repo_id=repo_id, folder_path=folder, **defaults | options)
