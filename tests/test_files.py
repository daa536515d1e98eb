"""Files on disk: which are missing, and which cannot be read."""

import errno
from pathlib import Path
from typing import Any

import pytest

from rlhf_cli.errors import RLHFError
from rlhf_cli.files import read_json_object


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE, errno.ENXIO, errno.ETIMEDOUT])
def test_only_an_absent_file_is_missing(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "manifest.json"
    assert read_json_object(path) is None and read_json_object(path / "below a file") is None
    path.write_text("{}")

    def broken(self: Path, *args: Any, **kwargs: Any) -> str:
        raise OSError(number, "a network disk", str(self))

    monkeypatch.setattr(Path, "open", broken)
    with pytest.raises(RLHFError, match=r"error\[E08\]: .*manifest.json cannot be read now: a network disk") as caught:
        read_json_object(path)
    assert caught.value.exit_code == 1
