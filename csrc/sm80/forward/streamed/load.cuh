// The order in which the forward's operands pass through the ring: for each key tile, from the last to the first, the
// chunks of K (and of Q, where it is not resident), then the steps of V. Of a key tile whose scores the partner
// computes, V alone.
#pragma once

#include "core/registers.cuh"
#include "sm80/streaming/steps.cuh"
#include "traits.cuh"
#include "turns.cuh"

namespace flash_cute::sm80::forward::streamed {

template <class Traits>
class Loader {
 public:
  using Element = typename Traits::Element;
  using Storage = typename Traits::Storage;

  CUTE_DEVICE Loader(FwdParams const& params, Storage const& smem, Turns<Traits::kPaired> const& turns,
                     bool left_resident, int columns)
      : params_(params), smem_(smem), turns_(turns), left_resident_(left_resident), columns_(columns) {
    begin_tile();
  }

  // All chunks of Q's rows.
  CUTE_DEVICE void load_query(uint32_t target) const {
    Cursor cursor = Cursor::of_chunks(queries(), fresh_thread_index());
    for (int chunk = 0; chunk < streaming::num_chunks(params_.head_dim); ++chunk) {
      cursor.template load_chunk<Traits::kBlockM>(target + chunk * streaming::kLeftBytes);
    }
  }

  // The next step.
  CUTE_DEVICE void operator()(uint32_t stage) {
    if (steps_ == 0) return;
    if (at_values_) {
      others_.load_values(stage);
    } else {
      if (left_resident_) {
        others_.template load_chunk<Traits::kBlockN>(stage);
      } else {
        others_.template load_chunks<Traits::kBlockN, Traits::kBlockM>(stage, queries_, params_.q_strides.row,
                                                                       stage + streaming::kRightBytes);
      }
    }
    if (--steps_ > 0) return;
    if (!at_values_) {
      begin_values();
    } else {
      turns_.advance();
      begin_tile();
    }
  }

 private:
  using Rows = streaming::Rows<Element>;
  using Cursor = streaming::Cursor<Element>;

  CUTE_DEVICE Rows queries() const {
    int const rows = smem_.tile.sequence.len_q - smem_.tile.coord.m_block * Traits::kBlockM;
    return {smem_.q, params_.q_strides.row, rows, params_.head_dim};
  }
  CUTE_DEVICE void begin_tile() {
    if (Traits::kPaired && !turns_.has_tile()) turns_.advance();  // the last turn of a CTA may have none
    if (!turns_.has_tile()) return;
    turns_.is_own() ? begin_keys() : begin_values();
  }
  CUTE_DEVICE void begin_keys() {
    Rows const k{smem_.k, params_.k_strides.row, smem_.tile.sequence.len_k, params_.head_dim};
    others_ = Cursor::of_chunks(k.from(turns_.tile() * Traits::kBlockN, 0), fresh_thread_index());
    if (!left_resident_) queries_ = streaming::OwnRows<Element>::of(queries(), fresh_thread_index());
    steps_ = streaming::num_chunks(params_.head_dim);
    at_values_ = false;
  }
  CUTE_DEVICE void begin_values() {
    int const first_key = turns_.tile() * Traits::kBlockN, len_k = smem_.tile.sequence.len_k;
    Rows const v{smem_.v, params_.v_strides.row, len_k, columns_};
    others_ = Cursor::of_values(v.from(first_key, 0), fresh_thread_index());
    steps_ = streaming::value_steps(len_k - first_key);
    at_values_ = true;
  }

  FwdParams const& params_;
  Storage const& smem_;
  bool left_resident_;
  int columns_;  // of V, from the CTA's first one on
  // The next step's:
  Turns<Traits::kPaired> turns_;
  bool at_values_;
  int steps_ = 0;  // with it, of the tile's chunks of K, or of its V; 0: there is no next step
  Cursor others_;  // K or V
  streaming::OwnRows<Element> queries_;  // where Q is not resident
};

}  // namespace flash_cute::sm80::forward::streamed
