"""Hook of mkdocs.yml: the site has the examples, too, which stand beside docs/ in the repository."""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files


def on_files(files: Files, config: Any) -> Files:
    """Add the examples to the files of the site."""
    root = Path(config.config_file_path).parent
    for path in (root / "examples").glob("*.*"):
        files.append(File.generated(config, f"examples/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Point links to the examples to those of the site."""
    return markdown.replace("](../examples/", "](examples/")
