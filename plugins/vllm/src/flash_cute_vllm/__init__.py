"""flash_cute as vLLM's attention backend "CUSTOM".

vLLM calls `register` in each of its processes, by the entry point `vllm.general_plugins` of this package. Nothing of
vLLM is imported before that.
"""

__all__ = ["register"]


def register() -> None:
    """Make the backend known to vLLM; again does no harm."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "flash_cute_vllm.backend.FlashCuteBackend")
