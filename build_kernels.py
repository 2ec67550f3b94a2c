"""Compiles csrc/ with nvcc, through ninja: in parallel, and only what changed.

    python build_kernels.py              both files, in place
    python build_kernels.py --binding    the Python binding alone, for a library that was built elsewhere
    python build_kernels.py --report     registers and spills of every kernel, from the last build's logs

The kernels are one C library of every csrc/**/*.cu, which knows its architectures and depends on the driver alone; the binding
is `sparkrt._kernels`, one per Python. SPARKRT_CUDA_ARCHS lists the architectures ("80,90a"); by default the local GPU's, or 90a.
An installation with SPARKRT_CUDA_ARCHS=none carries no kernels: what `make serve` and `make test` do where there is no GPU.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent
WORK = ROOT / "build" / "kernels"
LIBRARY = Path("sparkrt", "_lib", "libsparkrt_kernels.so")
BINDING = Path("sparkrt", f"_kernels{sysconfig.get_config_var('EXT_SUFFIX')}")
DEFAULT_ARCH = "90a"

FLAGS = "-std=c++17 -O3 -lineinfo -Xfatbin=-compress-all -Xptxas -v --Werror all-warnings -Xcompiler -fPIC,-Wall,-Werror"
BINDING_FLAGS = "-std=c++17 -O2 -shared -cudart none -Xcompiler -fPIC,-Wall,-Werror,-fvisibility=hidden"
# cudart is linked in and kept to ourselves: another copy in the process (CuPy's, a framework's) must not stand in for it
LINK_FLAGS = "-shared -cudart static -Xcompiler -static-libstdc++,-static-libgcc -Xlinker --exclude-libs,ALL,-z,defs"


def sources() -> list[Path]:
    return sorted(ROOT.glob("csrc/**/*.cu"))


def find_nvcc() -> str | None:
    """The CUDA compiler: on PATH, under CUDA_HOME, or where the toolkit usually lies."""
    homes = [Path(home) for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if home]
    return shutil.which("nvcc", path=os.pathsep.join([os.environ.get("PATH", ""), *(str(home / "bin") for home in homes)]))


def find_ninja() -> str:
    """Ninja from its Python package or PATH. Exits with a line that says what to install."""
    try:
        import ninja

        return str(Path(ninja.BIN_DIR) / "ninja")
    except ImportError:
        found = shutil.which("ninja")
        return found or sys.exit("sparkrt: nvcc is here but ninja is not: pip install ninja")


def wanted() -> bool:
    """Whether an installation is to carry kernels: SPARKRT_CUDA_ARCHS=none leaves them out."""
    return os.environ.get("SPARKRT_CUDA_ARCHS") != "none"


def architectures() -> list[str]:
    """What to compile for: SPARKRT_CUDA_ARCHS, else the GPUs of this machine, else 90a. For 90 it is 90a, whose wgmma is used."""
    asked = [{"90": "90a"}.get(a, a) for a in re.findall(r"\d+[af]?", os.environ.get("SPARKRT_CUDA_ARCHS", ""))]
    return list(dict.fromkeys(asked)) or local_architectures() or [DEFAULT_ARCH]


def local_architectures() -> list[str]:
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return []
    query = [smi, "--query-gpu=compute_cap", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False).stdout
    found = sorted({(int(major), int(minor)) for major, minor in re.findall(r"^(\d+)\.(\d+)", answer, re.MULTILINE)})
    return [f"{major}{minor}" + ("a" if major >= 9 else "") for major, minor in found]  # "a": wgmma and its kin


def toolkit_version(nvcc: str) -> str:
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"release (\d+\.\d+)", said)
    return found[1] if found else sys.exit(f"sparkrt: {nvcc} does not say its version")


def write_plan(nvcc: str, root: Path, library: bool, binding: bool) -> str:
    """build.ninja for the two files under `root`; returns a line about them."""
    codes = " ".join(f"-gencode arch=compute_{a},code=sm_{a}" for a in architectures())
    # a kernel's resource report is kept beside its object; nvcc's output is shown when it fails
    quiet = "> $out.log 2>&1 || (cat $out.log; exit 1)"
    plan = [
        f"builddir = {WORK}",  # where ninja keeps its books
        f"nvcc = {nvcc}",
        "rule kernel",
        f"  command = $nvcc {FLAGS} {codes} -I{ROOT / 'csrc'} -MD -MF $out.d -c $in -o $out {quiet}",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = nvcc $in",
        "rule link",
        f"  command = $nvcc {LINK_FLAGS} $in -o $out",
        "rule binding",
        f"  command = $nvcc {BINDING_FLAGS} $includes -MD -MF $depfile $in -o $out",
        "  depfile = $depfile",
        "  deps = gcc",
    ]
    if library:
        info = WORK / "build_info.cu"
        text = f"cuda={toolkit_version(nvcc)} archs={','.join(architectures())}"
        code = f'extern "C" const char* spark_build_info() {{ return "{text}"; }}\n'
        if not info.exists() or info.read_text() != code:
            info.write_text(code)
        objects = {str((WORK / path.relative_to(ROOT)).with_suffix(".o")): path for path in (*sources(), info)}
        plan += [f"build {target}: kernel {source}" for target, source in objects.items()]
        plan += [f"build {root / LIBRARY}: link {' '.join(objects)}", f"default {root / LIBRARY}"]
    if binding:
        import pybind11

        includes = (ROOT / "csrc", pybind11.get_include(), sysconfig.get_path("include"))
        plan += [f"build {root / BINDING}: binding {ROOT / 'csrc' / 'bindings.cpp'}"]
        plan += [f"  includes = {' '.join(f'-I{path}' for path in includes)}", f"  depfile = {WORK / 'bindings.d'}"]
        plan += [f"default {root / BINDING}"]
    (WORK / "build.ninja").write_text("\n".join(plan) + "\n")
    return f"{len(sources())} CUDA sources for {', '.join('sm_' + a for a in architectures())}" if library else "the binding"


def build(root: Path = ROOT, library: bool = True, binding: bool = True) -> None:
    """Compile what changed into `root`. Without nvcc or sources, say so in a line and do nothing."""
    nvcc = find_nvcc()
    if not sources():
        print("sparkrt: no CUDA sources: host backend only", flush=True)
    elif not nvcc:
        print("sparkrt: nvcc not found (PATH, CUDA_HOME, /usr/local/cuda): host backend only", flush=True)
    else:
        WORK.mkdir(parents=True, exist_ok=True)
        what = write_plan(nvcc, root, library, binding)
        jobs = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        command = [find_ninja(), "-f", str(WORK / "build.ninja"), "-j", str(jobs), "-k", "0", "--quiet"]
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            sys.exit("sparkrt: the CUDA build failed")
        print(f"sparkrt: compiled {what}", flush=True)


_KERNEL = re.compile(
    r"Compiling entry function '(?P<name>\S+)' for '(?P<arch>\S+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)


def report() -> None:
    """A line per kernel: those that spill first, then by file. Advice that ptxas gave (serialized wgmma and the like) follows."""
    found, advice = [], []
    for path in sources():
        log = (WORK / path.relative_to(ROOT)).with_suffix(".o.log")
        text = log.read_text() if log.exists() else ""
        source = str(path.relative_to(ROOT / "csrc"))
        advice += [f"{source}: {line.strip()}" for line in text.splitlines() if re.search(r"\(C\d+\)", line)]
        for match in _KERNEL.finditer(text):
            shared = re.search(r"(\d+) bytes smem", match["rest"])
            spills = int(match["stores"]) + int(match["loads"])
            found.append((-spills, source, match["arch"], int(match["registers"]), shared[1] if shared else "0", match["name"]))
    if not found:
        sys.exit("sparkrt: nothing was built yet: make kernels")
    names = "\n".join(row[-1] for row in found)
    if shutil.which("c++filt"):
        names = subprocess.run(["c++filt", "-p"], input=names, capture_output=True, text=True, check=True).stdout
    print(f"{'spills':>6} {'regs':>5} {'smem':>6}  {'arch':<8} {'source':<34} kernel")
    rows = sorted(zip(found, names.splitlines(), strict=True))
    for (spills, source, arch, registers, shared, _), name in rows:
        print(f"{-spills:>6} {registers:>5} {shared:>6}  {arch:<8} {source:<34} {name.replace('(anonymous namespace)::', '')}")
    print(*dict.fromkeys(advice), sep="\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binding", action="store_true", help="only the Python binding")
    parser.add_argument("--library", action="store_true", help="only the kernel library")
    parser.add_argument("--report", action="store_true", help="print the last build's resources, build nothing")
    options = parser.parse_args()
    if options.report:
        report()
    else:
        build(library=not options.binding, binding=not options.library)
