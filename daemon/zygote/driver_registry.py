"""The drivers by name. Each is imported only when it is requested: only the `cuda` driver needs CUDA installed."""

from gpulease.daemon.drivers.interface import ONE_BY_ONE, Driver, DriverError


def driver_named(name: str) -> Driver:
    """Return the driver of that name. Raises DriverError if a package that it needs is not installed.

    The embedded driver's name may have an architecture after a colon, and after a second colon the seed of the order in
    which it runs warps and blocks: "cpu:sm_80", "cpu::7". The name of the cards' driver may have ONE_BY_ONE after the
    colon; native code then queues each launch separately.
    """
    name, _, option = name.partition(":")
    # Only the embedded driver has an architecture and a seed; for the cards' driver, the text after the colon is a
    # switch.
    architecture, _, seed = option.partition(":")
    try:
        if name == "cpu":
            from gpulease.daemon.ptx.architecture import SM_90, parse_architecture
            from gpulease.daemon.ptx.driver import CpuDriver

            return CpuDriver(parse_architecture(architecture) if architecture else SM_90, int(seed) if seed else None)
        if name == "cuda":
            from gpulease.daemon.drivers.cuda.driver import CudaDriver

            return CudaDriver(has_chains=option != ONE_BY_ONE)
    except ImportError as error:
        raise DriverError(
            f"the {name} driver needs {error.name}, which is not installed",
            hint=f"pip install '.[daemon{',cuda' if name == 'cuda' else ''}]' in gpulease's repository",
        ) from None
    raise DriverError(f"there is no driver {name!r}", hint="The drivers are cuda and cpu.")
