"""Makes the .ptx of every .cu in crates/py/src/device, with the compiler that comes with torch (NVRTC). Needs no GPU."""

import ctypes
import pathlib
import re

import nvidia

SOURCES = pathlib.Path(__file__).parents[2] / "crates/py/src/device"
# Any GPU from Turing on; what the code asks of the driver is as old.
ARCHITECTURE, VERSION = "compute_75", "7.0"


def main():
    folders = [pathlib.Path(each) for each in nvidia.__path__]
    library = next(path for folder in folders for path in folder.glob("**/libnvrtc.so.*"))
    nvrtc = ctypes.CDLL(str(library))
    for source in sorted(SOURCES.glob("*.cu")):
        translate(nvrtc, source)


def translate(nvrtc, source):
    program = ctypes.c_void_p()
    check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.read_bytes(), source.name.encode(), 0, None, None))
    options = [f"--gpu-architecture={ARCHITECTURE}".encode()]
    outcome = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    size = ctypes.c_size_t()
    check(nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
    log = ctypes.create_string_buffer(size.value)
    check(nvrtc.nvrtcGetProgramLog(program, log))
    print(log.value.decode().strip())
    check(outcome)
    check(nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size)))
    ptx = ctypes.create_string_buffer(size.value)
    check(nvrtc.nvrtcGetPTX(program, ptx))
    assembly = re.sub(r"^//.*\n", "", ptx.value.decode(), flags=re.MULTILINE).strip()
    assembly = "\n".join(line.expandtabs(4).rstrip() for line in assembly.splitlines())
    source.with_suffix(".ptx").write_text(re.sub(r"\.version \S+", f".version {VERSION}", assembly) + "\n")


def check(outcome):
    if outcome:
        raise SystemExit(f"NVRTC failed: {outcome}")


if __name__ == "__main__":
    main()
