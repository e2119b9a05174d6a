"""Write the digits network in its compiled forms, and a linear model beside it, as examples.

    python examples/export_digits.py

Reads the weights that train_digits.py wrote; takes a quarter of a minute, and a C++ compiler.
On one machine every run writes the same files.
"""

import re
import tempfile
import zipfile
from pathlib import Path

import torch
from digits_data import REQUIRED_LINEAR_ACCURACY, Digits, load_split
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch._inductor import aoti_compile_and_package
from torch.export import Dim, ExportedProgram
from torch.nn import functional
from train_digits import REPOSITORY, SEED, WEIGHTS, accuracy, new_model

EXPORTED = REPOSITORY / "digits_exported" / "1" / "model.pt2"
PACKAGE = REPOSITORY / "digits_aoti" / "1" / "model.pt2"
PIPELINE = REPOSITORY / "digits_png" / "1" / "model.pt2"
LINEAR_WEIGHTS = REPOSITORY / "digits_factory" / "1" / "model.safetensors"

LARGEST_BATCH = 64
WEIGHT_PENALTY = 1e-2

# Left to itself, AOTInductor compiles for the processor that it runs on. This file shall run on
# every x86-64.
GENERIC = {
    "cpp.simdlen": 1,  # no vector instructions in the kernels
    "cpp.march": "x86-64",  # nor from the C++ compiler; the default is -march=native
    # A package needs the version of torch that compiled it but does not record it. The backend
    # reads this key, and refuses the package with another version.
    "aot_inductor.metadata": {"torch_version": torch.__version__},
    "aot_inductor.enable_line_tables": False,  # debug records: large, with local paths
}
# Names of source files, as assertions in C++ hold them; without the file's own name.
SOURCE_FOLDER = re.compile(rb"(?:/[\w.+-]+)+/(?=[\w.-]+\.(?:h|cpp)\0)")


def trained_model() -> nn.Module:
    model = new_model()
    model.load_state_dict(load_file(WEIGHTS))
    return model.eval()


def export(model: nn.Module) -> ExportedProgram:
    """Export the network for 1 to 64 images, without the paths of its sources."""
    # Two images, because a size of 1 would become a constant.
    images = torch.zeros(2, 1, 8, 8)
    batch = Dim("batch", min=1, max=LARGEST_BATCH)
    program = torch.export.export(model, (images,), dynamic_shapes={"image": {0: batch}})
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
    return program


def compile_package(program: ExportedProgram, path: Path) -> None:
    # PyTorch chooses oneDNN or NNPACK by batch size (below 16, or from 16 on), and the compiler
    # would fix the choice for the exported batch size. With both off, PyTorch's own convolution
    # chooses at each call.
    with (
        torch.backends.mkldnn.flags(enabled=False),
        torch.backends.nnpack.flags(enabled=False),
        tempfile.TemporaryDirectory() as folder,
    ):
        written = Path(folder) / path.name
        aoti_compile_and_package(program, package_path=str(written), inductor_configs=GENERIC)
        repack(written, path)


def repack(source: Path, target: Path) -> None:
    """Copy a package, compressed and without paths of this machine.

    The C++ sources are not needed to load the library. In the library only assertion messages
    contain paths; they are overwritten with slashes. The package's id is removed too, because it
    depends on the removed parts and differs from run to run.
    """
    with (
        zipfile.ZipFile(source) as package,
        zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as copy,
    ):
        for member in package.infolist():
            if member.filename.endswith((".cpp", "/serialization_id")):
                continue
            content = package.read(member)
            if member.filename.endswith(".so"):
                content = SOURCE_FOLDER.sub(lambda found: b"/" * len(found[0]), content)
            # A new ZipInfo has a fixed date.
            copy.writestr(zipfile.ZipInfo(member.filename), content, zipfile.ZIP_DEFLATED)


def train_linear(digits: Digits) -> nn.Module:
    """Fit a softmax regression on the pixels."""
    images, labels = torch.from_numpy(digits.images).flatten(1), torch.from_numpy(digits.labels)
    linear = nn.Linear(64, 10)
    optimizer = torch.optim.LBFGS(linear.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        penalty = WEIGHT_PENALTY * linear.weight.square().sum()
        value = functional.cross_entropy(linear(images), labels) + penalty
        value.backward()
        return value

    optimizer.step(loss)
    return linear


def main() -> None:
    torch.manual_seed(SEED)
    # One thread, as in train_digits.py: the weights must not depend on the machine.
    torch.set_num_threads(1)
    digits = load_split()
    linear = train_linear(digits.train)
    share = accuracy(nn.Sequential(nn.Flatten(), linear), digits.held_out)
    print(f"The linear model reads {share:.2%} of the held-out digits correctly.")
    if share < REQUIRED_LINEAR_ACCURACY:
        raise SystemExit(f"At least {REQUIRED_LINEAR_ACCURACY:.0%} are required.")
    save_file(linear.state_dict(), LINEAR_WEIGHTS)
    program = export(trained_model())
    compile_package(program, PACKAGE)
    for path in (EXPORTED, PIPELINE):
        torch.export.save(program, path)
    for path in (LINEAR_WEIGHTS, EXPORTED, PIPELINE, PACKAGE):
        print(f"wrote {path} ({path.stat().st_size / 1024:.0f} KiB)")


if __name__ == "__main__":
    main()
