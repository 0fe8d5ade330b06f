"""The command of one torchrun, the agent that starts and watches the processes of one machine."""

from __future__ import annotations

import signal
import sys

from megavlm.programs.launch.job import Job, program

GRACE = 240  # seconds for the last step and its save
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)  # what a launcher passes on to its agents


def words(job: Job, node: int, *, address: str, port: int, grace: int = GRACE) -> tuple[str, ...]:
    """Return the command of machine `node`'s agent. All agents meet at `address` and `port`, on machine 0.

    The rendezvous is static: ranks follow the numbers of the machines. torchrun reads $$ as $ in what it starts, and
    ${local_rank} as a number.
    """
    return (
        *(sys.executable, "-P", "-m", "torch.distributed.run", "--nnodes", str(job.nodes), "--node-rank", str(node)),
        *("--nproc-per-node", str(job.processes), "--master-addr", address, "--master-port", str(port)),
        # It would die of SIGUSR1, and would kill its ranks 30 s after a signal.
        *("--signals-to-handle", ",".join(each.name for each in SIGNALS), "--shutdown-timeout", str(grace)),
        *(*program(), *(flag.replace("$", "$$") for flag in job.flags)),
    )
