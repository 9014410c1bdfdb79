// Key tiles of small pages: a warp looks up the pages of 16 rows, and its lanes copy the vectors of rows side by side.
// TMA takes as long for a box of one row as for one of 16. Why this is a type of its own:
// sm90/decode/split_keys/copy_rows.cuh.
#pragma once

#include <cute/tensor.hpp>

#include "sm90/decode/common/copies.cuh"
#include "kernel_args.cuh"
#include "ring.cuh"
#include "traits.cuh"

namespace flash_cute::sm90::decode::latent {

template <class Traits>
class RowCopier {
 public:
  using Element = typename Traits::Element;
  static constexpr bool kByTma = false;
  static constexpr int kWarps = kProducerWarps;
  static constexpr int kChunkArrivals = kWarps * kCopyArrivals;
  static constexpr int kRows = kTileKeys / kWarps;  // a warp's

  CUTE_DEVICE RowCopier(KernelArgs const& args, typename Traits::SharedStorage& smem, int warp)
      : args_(args),
        smem_(smem),
        lane_(threadIdx.x % 32),
        first_row_(warp * kRows),
        head_(int(blockIdx.x) % args.params.heads_kv / args.shares) {}

  // The key's row of a lane; two lanes have the same. Of keys that no row sees no entry of the table is read.
  struct Row {
    int page;
    int row;  // of the page
  };
  CUTE_DEVICE Row look_up(Unit const& unit, int tile) const {
    PageTable const& table = args_.params.table;
    int const key = tile * kTileKeys + first_row_ + lane_ % kRows, page = key / table.page_size;
    bool const seen = key >= unit.seen_begin && key < unit.seen_end;
    return {.page = seen ? __ldg(table.entries + unit.batch * table.stride + page) : kNoPage,
            .row = key - page * table.page_size};
  }

  CUTE_DEVICE void load(Unit const&, int /*tile*/, Row const& own, PipelineState<kStages> state, int warpgroup) const {
    uint64_t const address = address_of(own);
    uint64_t from[kCopies];  // of the lane's vector of each kRowsAtOnce rows
    CUTE_UNROLL
    for (int i = 0; i < kCopies; ++i) {
      from[i] = __shfl_sync(0xffffffff, address, i * kRowsAtOnce + lane_ / kVectors);
      if (from[i] != 0) from[i] += lane_ % kVectors * kVectorBytes;
    }
    for_parts(warpgroup, [&](int part, int first_chunk, auto chunks) {
      wait_for(smem_.empty[state.stage][part], state.phase ^ 1);
      CUTE_UNROLL
      for (int chunk = first_chunk; chunk < first_chunk + chunks; ++chunk) {
        copy_chunk(from, chunk, smem_.tiles[state.stage] + chunk * kChunkElements);
        arrive_with_copies(smem_.full[state.stage][chunk]);
      }
    });
  }

  // Into L2: a tile's place becomes free late, so that its load is waited for. Half of the lanes have the even chunks,
  // half the odd ones.
  CUTE_DEVICE void prefetch(Row const& own) const {
    uint64_t const address = address_of(own);
    if (address == 0) return;
    CUTE_UNROLL
    for (int chunk = 0; chunk < kChunks; chunk += 2) {
      int const begin = (chunk + lane_ / kRows) * kRowBytes;
      if (begin < row_bytes()) asm volatile("prefetch.global.L2 [%0];" ::"l"(address + begin));
    }
  }

 private:
  static constexpr int kNoPage = -1;
  static constexpr int kRowBytes = kChunk * int{sizeof(Element)};
  static constexpr int kVectors = kRowBytes / kVectorBytes;  // of a row of a chunk
  static constexpr int kRowsAtOnce = 32 / kVectors;
  static constexpr int kCopies = kRows / kRowsAtOnce;  // of a chunk
  static_assert(2 * kRows == 32);

  CUTE_DEVICE int row_bytes() const { return int{sizeof(Element)} * args_.params.head_dim; }

  CUTE_DEVICE uint64_t address_of(Row const& row) const {
    DecodeParams const& params = args_.params;
    return address_of_row<Element>(params.k, params.k_strides, params.table.pages, head_, row.page, row.row);
  }

  // Rows of pages that do not exist become zeros, as do columns behind the head dim.
  CUTE_DEVICE void copy_chunk(uint64_t const (&from)[kCopies], int chunk, Element* to) const {
    int const first = lane_ / kVectors, vector = lane_ % kVectors;
    uint32_t const place = cast_smem_ptr_to_uint(to) + (first_row_ + first) * kRowBytes +
                           swizzled<kVectors>(first, vector) * kVectorBytes;
    bool const exists = chunk * kRowBytes + vector * kVectorBytes < row_bytes();
    CUTE_UNROLL
    for (int i = 0; i < kCopies; ++i) {
      int const row = i * kRowsAtOnce;
      copy_vector((place ^ swizzled<kVectors>(row, 0) * kVectorBytes) + row * kRowBytes,
                  from[i] + chunk * kRowBytes, from[i] != 0 && exists);
    }
  }

  KernelArgs const& args_;
  typename Traits::SharedStorage& smem_;
  int lane_;
  int first_row_;  // the warp's, of a tile
  int head_;       // of the keys
};

}  // namespace flash_cute::sm90::decode::latent
