// Programmatic dependent launch, on the architectures that have it: a kernel starts while the one before it still runs.
#pragma once

#include <cute/config.hpp>

namespace flash_cute::masks {

// The next kernel may start when every CTA has called this.
template <int kArch>
CUTE_DEVICE void launch_dependents() {
  if constexpr (kArch >= 90) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Waits until the kernel before has ended. Returns at once where the launch was an ordinary one.
template <int kArch>
CUTE_DEVICE void wait_for_kernel_before() {
  if constexpr (kArch >= 90) asm volatile("griddepcontrol.wait;" ::: "memory");
}

}  // namespace flash_cute::masks
