"""Which files are pages of the site: each lies there as in the repository, so that links hold."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PAGES = (
    "*.md",
    "LICENSE",
    "docs/**/*.md",
    "docs/*.png",
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
    return files
