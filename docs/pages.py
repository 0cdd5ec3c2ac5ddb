"""Which files are pages of the site, and what docstrings' roles link to.

Each file lies where it does in the repository, so that links hold. The pages of constants and of
options are made from the code.
"""

import re
from pathlib import Path

from generated import generated_pages  # next to this file, where hooks look first
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PAGES = (
    "*.md",
    "docs/images/*.png",
    "LICENSE",
    "docs/**/*.md",
    "docs/*.png",
    "docs/images/*.png",
    "docs/prose/vocabulary.py",
    "examples/*",
    "benchmarks/results/**/*",
    "tests/cuda_stand_in/README.md",
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Pages from all over the repository in place of those of one folder."""
    root = Path(config.config_file_path).parent
    for file in files.documentation_pages() + files.media_files():
        if file.src_dir == config.docs_dir:
            files.remove(file)
    for path in sorted({path for pattern in PAGES for path in root.glob(pattern)}):
        if path.is_file():
            name = path.relative_to(root).as_posix()
            files.append(File(name, str(root), config.site_dir, config.use_directory_urls))
    for name, content in generated_pages(root).items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_content(html: str, **_page: object) -> str:
    """``:class:`Plan``` of a docstring leads to it in the reference, if it is there."""
    return re.sub(r":(?:class|func|meth):<code>(?:fxremat\.)?([\w.]+)</code>", _link, html)


def _link(found: re.Match[str]) -> str:
    name = found[1]
    return f'<autoref identifier="fxremat.{name}" optional><code>{name}</code></autoref>'
