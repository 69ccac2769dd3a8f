"""What mkdocs calls: add the generated pages of docs/reference to the site."""

from __future__ import annotations

from generator import api, commands, configuration, exit_codes, files, messages, metrics, models
from generator.source import definitions
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files


def pages() -> dict[str, str]:
    """Every generated page: path below docs -> Markdown."""
    known = list(definitions())
    return {
        "reference/configuration.md": configuration.page(),
        "reference/models.md": models.page(known),
        "reference/commands.md": commands.page(),
        "reference/exit_codes.md": exit_codes.page(known),
        "reference/metrics.md": metrics.page(),
        "reference/messages.md": messages.page(known),
        "reference/files.md": files.page(known),
        "reference/api.md": api.page(known),
    }


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages (mkdocs event)."""
    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files
