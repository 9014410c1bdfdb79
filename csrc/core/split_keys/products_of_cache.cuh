// The products of a warp, by what the cache stores: numbers of q's type, or of float8, of which each of the two tensors
// has a type.
#pragma once

#include "products_float8.cuh"

namespace flash_cute::split_keys {

// Calls f(Bool) with whether the numbers are e5m2.
template <class F>
CUTE_DEVICE void with_float8_type(bool is_e5m2, F const& f) {
  if (is_e5m2) {
    f(std::true_type{});
  } else {
    f(std::false_type{});
  }
}

// Of kKeys keys of a tile, from `first` on. See multiply_qk, multiply_pv and multiply_pv_and_next_qk.
template <class Traits, int kKeys>
struct ProductsOfCache {
  using Cache = typename Traits::Cache;

  template <class Queries, class Scores>
  CUTE_DEVICE static void qk(DecodeParams const& params, Cache const* k, int first, Queries const& queries,
                             Scores& tSrS) {  // (MMA, 1, keys / 8)
    if constexpr (Traits::kFloat8) {
      with_float8_type(params.k_is_e5m2, [&](auto is_e5m2) {
        multiply_qk_float8<Traits, kKeys, is_e5m2>(k, first, queries, tSrS);
      });
    } else {
      multiply_qk<Traits, kKeys>(k, first, queries, tSrS);
    }
  }

  template <class FragP, class Accumulator>
  CUTE_DEVICE static void pv(DecodeParams const& params, Cache const* v, int first, KeysThatExist const& exist,
                             FragP const& tOrP,    // (MMA, 1, keys / 16)
                             Accumulator& tOrO) {  // (MMA, 1, D / 8)
    if constexpr (Traits::kFloat8) {
      with_float8_type(params.v_is_e5m2, [&](auto is_e5m2) {
        multiply_pv_float8<Traits, kKeys, is_e5m2>(v, first, exist, tOrP, tOrO);
      });
    } else {
      multiply_pv<Traits, kKeys>(v, first, exist, tOrP, tOrO);
    }
  }

  template <class FragP, class Accumulator, class Queries, class Scores>
  CUTE_DEVICE static void pv_and_next_qk(DecodeParams const& params, Cache const* v, Cache const* k, int first,
                                         KeysThatExist const& exist,
                                         FragP const& tOrP,  // (MMA, 1, keys / 16)
                                         Accumulator& tOrO,  // (MMA, 1, D / 8)
                                         Queries const& queries,
                                         Scores& tSrS) {  // (MMA, 1, keys / 8)
    if constexpr (Traits::kFloat8) {
      with_float8_type(params.k_is_e5m2, [&](auto k_is_e5m2) {
        with_float8_type(params.v_is_e5m2, [&](auto v_is_e5m2) {
          multiply_pv_and_next_qk_float8<Traits, kKeys, k_is_e5m2, v_is_e5m2>(v, k, first, exist, tOrP, tOrO, queries,
                                                                              tSrS);
        });
      });
    } else {
      multiply_pv_and_next_qk<Traits, kKeys>(v, k, first, exist, tOrP, tOrO, queries, tSrS);
    }
  }
};

}  // namespace flash_cute::split_keys
