"""A hook of mkdocs.yml: what lies elsewhere in the project and belongs to the site, too."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

_ELSEWHERE = {"changelog.md": "CHANGELOG.md", "log.md": "benchmarks/LOG.md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    root = Path(config.config_file_path).parent
    for uri, path in _ELSEWHERE.items():
        files.append(File.generated(config, uri, abs_src_path=str(root / path)))
    return files
