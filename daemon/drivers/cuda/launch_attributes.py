"""Launches with attributes: cooperative launches, and launches in clusters (CUDA driver API, cuLaunchKernelEx)."""

import ctypes
import math
from typing import Any, Final

from cuda.bindings import driver as api

from gpulease.daemon.drivers.interface import Dim3, DriverLaunchAttributes, LaunchRejected

_ATTRIBUTE: Final = api.CUlaunchAttributeID
_PARAM_BUFFER_POINTER: Final = 1
_PARAM_BUFFER_SIZE: Final = 2

_TOO_LARGE: Final = int(api.CUresult.CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE)


def launch_with(
    stream: int,
    kernel: Any,
    grid: Dim3,
    block: Dim3,
    shared_bytes: int,
    params: bytes,
    attributes: DriverLaunchAttributes,
) -> int:
    """Queue a launch in the current context; return the CUresult, 0 if it was queued."""
    config = _config(stream, grid, block, shared_bytes, attributes)
    # The parameters are passed as one buffer, by CU_LAUNCH_PARAM_BUFFER_POINTER and its size.
    size = ctypes.c_size_t(len(params))
    # As for cuLaunchKernel in launch.ll: the buffer belongs to the caller again on return.
    buffer = ctypes.create_string_buffer(params, max(len(params), 1))
    names = (_PARAM_BUFFER_POINTER, ctypes.addressof(buffer), _PARAM_BUFFER_SIZE, ctypes.addressof(size), 0)
    extra = (ctypes.c_void_p * len(names))(*names)
    (result,) = api.cuLaunchKernelEx(config, api.CUfunction(kernel.function), 0, ctypes.addressof(extra))
    return int(result)


def _config(stream: int, grid: Dim3, block: Dim3, shared_bytes: int, attributes: DriverLaunchAttributes) -> Any:
    config = api.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = block
    config.sharedMemBytes = shared_bytes
    config.hStream = api.CUstream(stream)
    # Attributes are a list in the configuration; each is a tag and a union.
    named = []
    if attributes.is_cooperative:
        cooperative = api.CUlaunchAttribute()
        cooperative.id = _ATTRIBUTE.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        cooperative.value.cooperative = 1
        named.append(cooperative)
    if attributes.cluster is not None:
        cluster = api.CUlaunchAttribute()
        cluster.id = _ATTRIBUTE.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        dim = cluster.value.clusterDim
        dim.x, dim.y, dim.z = attributes.cluster
        named.append(cluster)
    config.attrs, config.numAttrs = named, len(named)
    return config


def attributes_refused(
    kernel: Any, grid: Dim3, block: Dim3, shared_bytes: int, attributes: DriverLaunchAttributes, result: int
) -> LaunchRejected | None:
    """Return the error of a launch that the driver refused for its attributes; None if these were not the reason."""
    # Cooperative: the grid is larger than the card can hold at once.
    if result == _TOO_LARGE and attributes.cluster is None:
        most = _most_at_once(kernel, block, shared_bytes)
        return LaunchRejected(
            f"{kernel.name}: a cooperative launch of {math.prod(grid)} blocks was requested; at most "
            f"{most} of its blocks can run at the same time",
            hint="Launch at most that many blocks, and let each do more.",
        )
    # Clusters: the driver's error is general, so ask for the largest cluster that fits.
    if attributes.cluster is not None:
        blocks = math.prod(attributes.cluster)
        most = _largest_cluster(kernel, grid, block, shared_bytes)
        if blocks > most:
            return LaunchRejected(
                f"{kernel.name}: clusters of {blocks} blocks were requested; at most {most} fit on this card",
                hint="Use smaller clusters, or none; clusters need a card of compute capability 9.0 or newer.",
            )
    return None


def _most_at_once(kernel: Any, block: Dim3, shared_bytes: int) -> int:
    """Count the blocks of a kernel that the whole card holds at the same time."""
    function = api.CUfunction(kernel.function)
    # The occupancy depends on the block and on shared memory; it is per multiprocessor.
    _, per_processor = api.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, math.prod(block), shared_bytes)
    _, device = api.cuCtxGetDevice()
    attribute = api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
    _, multiprocessors = api.cuDeviceGetAttribute(attribute, device)
    return int(per_processor or 0) * int(multiprocessors or 0)


def _largest_cluster(kernel: Any, grid: Dim3, block: Dim3, shared_bytes: int) -> int:
    # The query takes the launch without its cluster.
    config = _config(0, grid, block, shared_bytes, DriverLaunchAttributes(is_cooperative=False, cluster=None))
    result, most = api.cuOccupancyMaxPotentialClusterSize(api.CUfunction(kernel.function), config)
    return 0 if int(result) else int(most)
