// Operands of WGMMA, which reads them from shared memory by descriptors.
#pragma once

#include "describe.h"

namespace inspect {

// The fields of a WGMMA matrix descriptor: bytes, and the swizzle as the hardware numbers it.
template <class Fragment>
void add_descriptor(Details& out, std::string const& name, Fragment const& fragment) {
  auto const bits = fragment.data().desc_.bitfield;
  out.facts[name + ".start"] = 16 * int(bits.start_address_);
  out.facts[name + ".leading"] = 16 * int(bits.leading_byte_offset_);
  out.facts[name + ".stride"] = 16 * int(bits.stride_byte_offset_);
  out.facts[name + ".swizzle"] = int(bits.layout_type_);
}

}  // namespace inspect
