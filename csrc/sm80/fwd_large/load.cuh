// The order in which the forward's operands pass through the ring: for each key tile, from the last to the first, the
// chunks of K (and of Q, where it is not resident), then the steps of V.
#pragma once

#include "../large/steps.cuh"
#include "traits.cuh"

namespace flash_cute::sm80::fwd_large {

template <class Traits>
class Loader {
 public:
  using Element = typename Traits::Element;
  using Storage = typename Traits::Storage;

  CUTE_DEVICE Loader(FwdParams const& params, Storage const& smem, bool left_resident, int columns, int thread)
      : params_(params),
        smem_(smem),
        left_resident_(left_resident),
        columns_(columns),
        thread_(thread),
        tile_(smem.tile.keys.end - 1) {}

  // One chunk of Q's rows.
  CUTE_DEVICE void load_query_chunk(int chunk, uint32_t target) const {
    int const rows = smem_.tile.sequence.len_q - smem_.tile.coord.m_block * Traits::kBlockM;
    Rows const q{smem_.q, params_.q_strides.row, rows, params_.head_dim};
    large::load_chunk<Traits::kBlockM>(q.from(0, chunk * large::kChunk), target, thread_);
  }

  // The next step.
  CUTE_DEVICE void operator()(uint32_t stage) {
    if (tile_ < smem_.tile.keys.begin) return;
    int const chunks = large::num_chunks(params_.head_dim);
    int const first_key = tile_ * Traits::kBlockN, len_k = smem_.tile.sequence.len_k;
    if (step_ < chunks) {
      Rows const k{smem_.k, params_.k_strides.row, len_k, params_.head_dim};
      large::load_chunk<Traits::kBlockN>(k.from(first_key, step_ * large::kChunk), stage, thread_);
      if (!left_resident_) load_query_chunk(step_, stage + large::kRightBytes);
    } else {
      Rows const v{smem_.v, params_.v_strides.row, len_k, columns_};
      large::load_values(v.from(first_key + (step_ - chunks) * large::kValueKeys, 0), stage, thread_);
    }
    if (++step_ == chunks + large::value_steps(len_k - first_key)) {
      step_ = 0;
      --tile_;
    }
  }

 private:
  using Rows = large::Rows<Element>;

  FwdParams const& params_;
  Storage const& smem_;
  bool left_resident_;
  int columns_;  // of V, from the CTA's first one on
  int thread_;
  int tile_;      // the next step's
  int step_ = 0;
};

}  // namespace flash_cute::sm80::fwd_large
