"""Builds the stand-in's libraries: what torch's libraries ask for, and nothing else.

``make_stubs.py TORCH_LIB HEADERS OUT``
"""

import pathlib
import re
import subprocess
import sys
import tempfile

SOURCE = pathlib.Path(__file__).parent

# Where names come from that say no library, by how they begin.
UNVERSIONED = {
    "cuFile": "libcufile.so.0",
    "cusparseLt": "libcusparseLt.so.0",
    "nccl": "libnccl.so.2",
    "nvshmem": "libnvshmem_host.so.3",
    "cu": "libcuda.so.1",
}
NVSHMEM = "NVSHMEM"  # the version of that library's symbols
NEEDED = [*UNVERSIONED.values(), "libcurand.so.10"]
BY_HAND = {
    "libcudart": "runtime",
    "libcuda": "driver",
    "libcublas": "libraries",
    "libcublasLt": "libraries",
    "libcudnn": "libraries",
    "libnccl": "libraries",
    "libcusparse": "libraries",
    "libcusolver": "libraries",
    "libnvrtc": "libraries",
    "libcupti": "libraries",
}  # by the library's name without its version, which torch says
FLAGS = ["-O1", "-g", "-fPIC", "-fvisibility=hidden", "-w"]


def names(path: pathlib.Path, *options: str) -> list[str]:
    """The last word of each line that ``nm`` prints."""
    done = subprocess.run(["nm", *options, path], capture_output=True, text=True, check=True)
    return [line.split()[-1] for line in done.stdout.splitlines() if line.strip()]


def asked_of_libraries(torch_lib: pathlib.Path) -> dict[str, set[str]]:
    """What torch's libraries leave undefined, by the library that has it."""
    asked: dict[str, set[str]] = {name: set() for name in NEEDED}
    for path in sorted(torch_lib.glob("*.so")):
        for name in names(path, "-D", "--undefined-only"):
            symbol, _, library = name.partition("@")
            library = library.lstrip("@")
            if re.match(r"lib(cu|nv|nccl)", library):
                asked.setdefault(library, set()).add(symbol)
            elif not library or library == NVSHMEM:
                for start, home in UNVERSIONED.items():
                    if re.match(start + "[A-Z_]", symbol) or (
                        start not in ("cu",) and symbol.startswith(start)
                    ):
                        asked[home].add(symbol)
                        break
    return asked


def management(out: pathlib.Path) -> None:
    """NVML, which torch opens by its name."""
    library = "libnvidia-ml.so.1"
    command = ["gcc", "-shared", *FLAGS, SOURCE / "management.c", "-o", out / library]
    subprocess.run([*command, f"-Wl,-soname,{library}"], check=True)


def main() -> None:
    torch_lib, headers, out = map(pathlib.Path, sys.argv[1:])
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        build(torch_lib, headers, out, pathlib.Path(folder))
    management(out)


def build(
    torch_lib: pathlib.Path, headers: pathlib.Path, out: pathlib.Path, folder: pathlib.Path
) -> None:
    asked = asked_of_libraries(torch_lib)
    runtime = out / next(name for name in asked if name.startswith("libcudart.so."))
    cuda = runtime.name.rsplit(".", 1)[1]
    objects = {}
    for source in ("runtime.cpp", "driver.cpp", "libraries.c"):
        target = folder / (source.split(".")[0] + ".o")
        compiler = ["g++", "-std=c++17"] if source.endswith("cpp") else ["gcc"]
        command = [*compiler, *FLAGS, f"-I{headers}", f"-DSTANDIN_CUDA={cuda}"]
        subprocess.run([*command, "-c", SOURCE / source, "-o", target], check=True)
        objects[target.stem] = target
    have = {
        stem: set(names(path, "--defined-only", "--extern-only")) for stem, path in objects.items()
    }
    for library in sorted(asked, key=lambda name: name != runtime.name):  # all link the runtime
        symbols = asked[library]
        plain = library.split(".")[0]
        stem = BY_HAND.get(plain)
        missing = sorted(symbols - (have[stem] if stem else set()))
        quiet = plain in ("libcupti", "libcudart")
        lines = [
            "extern void standin_note(const char*);",
            '#define API __attribute__((visibility("default")))',
        ]
        for name in missing:
            note = "" if quiet else f'standin_note("{name}"); '
            # Of the runtime what is not there is refused: nothing is to seem to work.
            value = 801 if library == runtime.name else 0
            lines.append(f"API long {name}(void) {{ {note}return {value}; }}")
        stubs = folder / f"{library}.c"
        stubs.write_text("\n".join(lines) + "\n")
        if stem in ("runtime", "driver"):
            shown = "*"
        else:
            shown = "; ".join(sorted(symbols)) or "standin_nothing"
        script = folder / f"{library}.map"
        rest = "" if shown == "*" else " local: *;"
        version = NVSHMEM if "nvshmem" in library else library
        script.write_text(f"{version} {{ global: {shown};{rest} }};\n")
        command = ["g++", "-shared", *FLAGS, "-x", "c", str(stubs), "-x", "none"]
        if stem:
            command.append(str(objects[stem]))
        command += [
            "-o",
            str(out / library),
            f"-Wl,-soname,{library}",
            f"-Wl,--version-script={script}",
        ]
        if library != runtime.name:
            command += [str(runtime), "-Wl,-rpath,$ORIGIN"]
        subprocess.run([*command, "-ldl", "-lpthread"], check=True)
        print(f"{library}: {len(symbols)} asked for, {len(missing)} of them do nothing")


if __name__ == "__main__":
    main()
