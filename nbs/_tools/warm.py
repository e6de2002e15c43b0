"""Kernels that have imported torch and the other large packages before they start: forks of one process, as multiprocessing's fork server makes them.

A kernel of its own needs 3 to 5 s for these imports, a fork 0.1 s.
"""

import multiprocessing
import os
import signal
import sys
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from jupyter_client.manager import AsyncKernelManager

# Not those of leakmel: they decide at import whether they run in a notebook.
IMPORTED = """ipykernel.kernelapp nbformat nbclient jupyter_client.manager h5py jinja2 numba pandas plotly.graph_objects plotly.io
plotly.subplots psutil scipy.signal scipy.stats sklearn.ensemble sklearn.linear_model sklearn.metrics soundfile soxr torch"""


def _serve(arguments: list[str], folder: str, environment: dict[str, str]) -> None:
    "Be a kernel, as `python -m ipykernel_launcher` in a folder is one."
    import plotly.io
    from ipykernel.kernelapp import IPKernelApp

    os.setsid()
    os.chdir(folder)
    os.environ |= environment
    sys.path[:] = [p for p in sys.path if p != str(Path(__file__).parent)]
    plotly.io.renderers.default = (
        "plotly_mimetype"  # without a kernel, it chose the browser when it was imported
    )
    # as its child the kernel ends with the fork server
    IPKernelApp.launch_instance([*arguments, f"--IPKernelApp.parent_handle={os.getppid()}"])


class _Kernel:
    "A forked kernel with the methods that jupyter_client calls on a process."

    stdin = stdout = stderr = None

    def __init__(self, *arguments: Any):
        self.process = context().Process(target=_serve, args=arguments)
        self.process.start()
        self.pid = self.process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self) -> int | None:
        self.process.join()
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None and self.pid:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def context() -> ForkServerContext:
    "Processes that are forks of the one with the imports."
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED.split())
    return context


class WarmKernelManager(AsyncKernelManager):
    "Start kernels as forks of the process that has the imports."

    async def _async_launch_kernel(self, kernel_cmd: list[str], **kw: Any) -> None:
        provisioner: Any = self.provisioner
        arguments = kernel_cmd[kernel_cmd.index("ipykernel_launcher") + 1 :]
        provisioner.process = _Kernel(arguments, str(kw["cwd"]), dict(kw["env"]))
        provisioner.pid = provisioner.process.pid
        self._reconcile_connection_info(provisioner.connection_info)
