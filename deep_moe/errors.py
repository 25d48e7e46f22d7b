"""The exceptions of deep_moe. Wrong arguments raise TypeError (not a tensor) or ValueError instead."""


class DeepMoeError(RuntimeError):
    """Base of everything below."""


class MismatchError(DeepMoeError):
    """Ranks disagree about something that must be equal on all of them; raised on every rank."""


class PeerTimeout(DeepMoeError):
    """A rank, or a part of a kernel, did not answer within the time-out."""


class JitError(DeepMoeError):
    """A kernel could not be compiled, found or loaded; the message holds the compiler's whole log."""


class DeviceError(DeepMoeError):
    """The CUDA driver is missing or refused something, or a GPU cannot do what was asked of it."""


class EmulatorFault(DeepMoeError):
    """The emulator caught wrong synchronisation or a wrong access."""


class Deadlock(EmulatorFault):
    """Nothing can run and nothing is in flight."""


class OutOfBounds(EmulatorFault):
    """An access outside a buffer field or a shared-memory region."""


class Protocol(EmulatorFault):
    """A rule of the hardware was broken: a race, a missing fence, a wrong count, a wrong descriptor."""
