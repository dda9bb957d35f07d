"""Which files the rendered site has: a hook of mkdocs, which mkdocs.yml names.

mkdocs expects all pages in one folder. Here they are README.md, CONTRIBUTING.md, docs/ and course/,
whose links are relative to the repository. So the site has the repository's tree: each page and
picture at its own path. A source file that a page links to becomes a page, too, with its text
highlighted; the search leaves these out.
"""

import re
from pathlib import Path

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parent.parent
PAGES = sorted(path for pattern in ("*.md", "docs/*.md", "docs/log/*.md", "course/*.md")
               for path in ROOT.glob(pattern))
LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=[#)])")  # in [text](path#heading): the path
SHOWN = {".py": "python", ".cpp": "cpp", ".h": "cpp", ".toml": "toml"}


def targets(page: Path) -> set[Path]:
    """The files of the repository that a page links to, pictures in HTML among them."""
    text = page.read_text(encoding="utf-8")
    names = LINK.findall(text) + re.findall(r'(?:src|srcset)="(.*?)"', text)
    return {(page.parent / name).resolve() for name in names if "://" not in name}


def on_files(files: Files, *, config) -> Files:
    found = [file for file in files if file.src_dir != config.docs_dir]  # the theme's own
    for path in PAGES:
        found.append(File.generated(config, name(path), abs_src_path=str(path)))
    for path in sorted(set().union(*map(targets, PAGES)) - set(PAGES)):
        if path.suffix in SHOWN:
            text = path.read_text(encoding="utf-8")
            found.append(File.generated(
                config, name(path) + ".md", inclusion=InclusionLevel.NOT_IN_NAV,
                content=f"---\nsearch:\n  exclude: true\n---\n# {name(path)}\n\n"
                        f"````{SHOWN[path.suffix]}\n{text}````\n"))
        elif path.suffix == ".md":  # the card of a bundled model
            found.append(File.generated(config, name(path), abs_src_path=str(path),
                                        inclusion=InclusionLevel.NOT_IN_NAV))
        elif path.is_file():
            found.append(File.generated(config, name(path), abs_src_path=str(path)))
    return Files(found)


def on_page_markdown(markdown: str, *, page, **unused) -> str:
    """Links to source lead to its page. A folder has none: its name alone is left."""
    here = ROOT / Path(page.file.src_uri).parent

    def to_page(found: re.Match) -> str:
        path = here / found[1]
        return found[1] + ".md" if path.suffix in SHOWN else found[1]

    markdown = re.sub(r"\[([^\]]*)\]\(([^)\s#]+)\)",
                      lambda found: found[1] if (here / found[2]).is_dir() else found[0], markdown)
    return LINK.sub(to_page, markdown)


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()
