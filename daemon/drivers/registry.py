"""The drivers by name. Each is imported only when asked for: only the `cuda` driver needs CUDA installed."""

from gpulease.daemon.drivers.interface import Driver, DriverError


def driver_named(name: str) -> Driver:
    """The driver of that name. Raises DriverError if what it needs is not installed."""
    try:
        if name == "cpu":
            from gpulease.daemon.drivers.cpu.driver import CpuDriver

            return CpuDriver()
        if name == "cuda":
            from gpulease.daemon.drivers.cuda.driver import CudaDriver

            return CudaDriver()
    except ImportError as error:
        raise DriverError(
            f"the {name} driver needs {error.name}, which is not installed",
            hint=f"pip install '.[daemon{',cuda' if name == 'cuda' else ''}]' in gpulease's repository",
        ) from None
    raise DriverError(f"there is no driver {name!r}", hint="The drivers are cuda and cpu.")
