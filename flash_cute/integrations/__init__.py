"""Other projects' interfaces to attention, served by flash_cute: each a module, imported by whoever wants it.

* `flash_cute.integrations.flash_attn`: the functions of flash-attn 2.8, and `install()` for `import flash_attn`.
* `flash_cute.integrations.flash_attn_interface`: FlashAttention-3's, whose signatures differ.
* `flash_cute.integrations.sdpa`: `torch.nn.functional.scaled_dot_product_attention` and
  `torch.nn.attention.varlen.varlen_attn`, as functions, and `enable()` for code that calls PyTorch's own.
* `flash_cute.integrations.transformers`: `register()`, an attention implementation of Hugging Face's Transformers.

Nothing is imported here, so that `import flash_cute` pays for none of them.
"""
