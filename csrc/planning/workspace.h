// Lays out the parts of a workspace, one after the other.
#pragma once

#include <cstdint>

namespace flash_cute {

class WorkspaceLayout {
 public:
  // The offset of a new part. Parts begin at multiples of 128 bytes unless less will do.
  int64_t take(int64_t bytes, int64_t alignment = 128) {
    int64_t const begin = (bytes_ + alignment - 1) / alignment * alignment;
    bytes_ = begin + bytes;
    return begin;
  }

  int64_t bytes() const { return bytes_; }

  explicit WorkspaceLayout(int64_t bytes = 0) : bytes_(bytes) {}

 private:
  int64_t bytes_;
};

}  // namespace flash_cute
