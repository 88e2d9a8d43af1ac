"""Launch: the same script in one process or many, on one machine or several, on GPUs or the CPU.

``launch`` starts the workers, passes signals on, returns the first failing worker's exit code and leaves no
process behind. Several workers run under torch's elastic agent, in this process; ``import acceler8.launch``
loads no torch.
"""

from acceler8.launch.run import launch
from acceler8.launch.spec import LaunchSpec
from acceler8.launch.worker_environment import child_environment

__all__ = ["LaunchSpec", "child_environment", "launch"]
