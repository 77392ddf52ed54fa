"""The examples of Lightning and accelerate with workers over connections: the losses are those of torch's loader."""

import pytest
from test_examples import EXAMPLES, on_torch, outcome

pytestmark = [pytest.mark.ecosystem, pytest.mark.timeout(1200)]

# The workers are processes of this machine, as tests/lib/remote_support.py starts them.
PROGRAM = f"""
import runpy, sys
from pathlib import Path
import rustloader
sys.path[:0] = [{str(EXAMPLES)!r}, {str(EXAMPLES.parents[1] / "tests" / "lib")!r}]
from remote_support import LoopbackContext
context = LoopbackContext(Path(sys.argv.pop(1)))
rustloader.install(multiprocessing_context=context)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
assert len(context.calls) >= 4
"""


@pytest.mark.parametrize(("name", "batches"), [("lightning_fit", 48), ("accelerate_train", 24)])
def test_an_example_has_the_same_losses(name, batches, tmp_path):
    losses, counts = outcome("-c", PROGRAM, str(tmp_path), str(EXAMPLES / f"{name}.py"), "--no-install")
    assert losses == on_torch(name, (), ())[0]
    assert counts == [batches]
