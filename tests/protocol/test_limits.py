from gpulease.protocol import limits
from gpulease.protocol.framing import HEADER_BYTES


def test_the_limits_agree_with_each_other() -> None:
    """A message within its own limits must fit the frame it travels in."""
    assert limits.DATA_CHUNK_BYTES <= limits.MAX_DATA_BYTES
    assert limits.MAX_DATA_BYTES + HEADER_BYTES + 20 <= limits.MAX_PAYLOAD_BYTES
    texts = 4 * limits.MAX_ERROR_TEXT_BYTES
    assert texts < limits.MAX_CONTROL_PAYLOAD_BYTES
    launch = limits.MAX_KERNEL_NAME_BYTES + limits.MAX_ARGUMENT_BYTES + 4 * limits.MAX_ARGUMENTS
    assert launch < limits.RECEIVE_BUFFER_BYTES
    assert limits.RECEIVE_BUFFER_BYTES <= limits.RETAINED_BUFFER_BYTES <= limits.MAX_PAYLOAD_BYTES


def test_counts_fit_their_fields() -> None:
    assert max(limits.MAX_ARGUMENTS, limits.MAX_KERNELS, limits.MAX_TLVS) <= 0xFFFF
    assert limits.MAX_PAYLOAD_BYTES <= 0xFFFF_FFFF
    assert limits.MAX_ERROR_TEXT_BYTES <= 0xFFFF
