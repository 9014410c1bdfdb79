// Static layouts, read from their types into arrays.
//
// Nothing of CuTe runs here: the partitions are formed in functions of which only the return type is asked,
// a list of Entry<name, kind, layout>, so that g++ generates no code for them. That is a third of the time.
#pragma once

#include "host.h"

#include <algorithm>
#include <string>
#include <type_traits>
#include <utility>

#include "registry.h"

namespace inspect {

using namespace cute;

// --- A layout at run time -------------------------------------------------------------------------------

struct Leaf {
  int size;
  int stride;
  int axis;  // of an identity layout: which coordinate the stride counts
};
using Mode = std::vector<Leaf>;  // colexicographic: the first leaf varies fastest

inline int size_of(Mode const& mode) {
  int size = 1;
  for (Leaf const& leaf : mode) size *= leaf.size;
  return size;
}

struct Coord {
  int axis[2] = {0, 0};
};

inline Coord at(Mode const& mode, int index) {
  Coord coord;
  for (Leaf const& leaf : mode) {
    coord.axis[leaf.axis] += index % leaf.size * leaf.stride;
    index /= leaf.size;
  }
  return coord;
}

struct StaticLayout {
  std::vector<Mode> modes;
  int bits = 0, base = 0, shift = 0;  // cute::Swizzle's; no bits: none

  int swizzle(int index) const {
    int const mask = ((1 << bits) - 1) << (base + shift);
    return index ^ ((index & mask) >> shift);
  }
};

// --- From types -----------------------------------------------------------------------------------------

template <class Shape, class Stride>
struct ReadMode;
template <auto kSize, auto kStride>
struct ReadMode<C<kSize>, C<kStride>> {
  static void append(Mode& mode) { mode.push_back({int(kSize), int(kStride), 0}); }
};
template <auto kSize, auto kStride, int kAxis>
struct ReadMode<C<kSize>, ScaledBasis<C<kStride>, kAxis>> {
  static void append(Mode& mode) { mode.push_back({int(kSize), int(kStride), kAxis}); }
};
template <class... Shapes, class... Strides>
struct ReadMode<tuple<Shapes...>, tuple<Strides...>> {
  static void append(Mode& mode) { (ReadMode<Shapes, Strides>::append(mode), ...); }
};

template <class Shape, class Stride>
Mode read_mode() {
  Mode mode;
  ReadMode<Shape, Stride>::append(mode);
  return mode;
}

// One mode for each part of a tuple.
template <class Shape, class Stride>
struct ReadModes;
template <class... Shapes, class... Strides>
struct ReadModes<tuple<Shapes...>, tuple<Strides...>> {
  static std::vector<Mode> read() { return {read_mode<Shapes, Strides>()...}; }
};

template <class Layout>
struct ReadLayout;
template <class Shape, class Stride>
struct ReadLayout<Layout<Shape, Stride>> {
  static StaticLayout read() { return {ReadModes<Shape, Stride>::read()}; }
};
template <int kBits, int kBase, int kShift, class Plain>
struct ReadLayout<ComposedLayout<Swizzle<kBits, kBase, kShift>, C<0>, Plain>> {
  static StaticLayout read() { return {ReadLayout<Plain>::read().modes, kBits, kBase, kShift}; }
};
// WGMMA's layouts permute the bits of the byte address.
template <int kBits, int kBase, int kShift, int kElementBits, class Plain>
struct ReadLayout<ComposedLayout<Swizzle<kBits, kBase, kShift>, smem_ptr_flag_bits<kElementBits>, Plain>> {
  static StaticLayout read() {
    static_assert(kElementBits == 16 || kElementBits == 8);
    return {ReadLayout<Plain>::read().modes, kBits, kBase - (kElementBits == 16), kShift};
  }
};

// Who holds which part of a tile: threads' modes, then a thread's values'.
struct Partition {
  std::vector<Mode> threads;
  std::vector<Mode> values;
};

template <class Layout>
struct ReadPartition;
// TiledCopy::tidfrg_S and _D: (thread, value, (rest...))
template <class Thr, class Val, class Rest, class ThrStride, class ValStride, class RestStride>
struct ReadPartition<Layout<tuple<Thr, Val, Rest>, tuple<ThrStride, ValStride, RestStride>>> {
  static Partition read() {
    Partition part{{read_mode<Thr, ThrStride>()}, {read_mode<Val, ValStride>()}};
    std::vector<Mode> const rest = ReadModes<Rest, RestStride>::read();
    part.values.insert(part.values.end(), rest.begin(), rest.end());
    return part;
  }
};
// TiledMMA::thrfrg_A, _B and _C: ((thread, (thread0, thread1)), (value, (rest0, rest1)))
template <class Thr, class Thrs, class Val, class Rest, class ThrStride, class ThrsStride, class ValStride,
          class RestStride>
struct ReadPartition<
    Layout<tuple<tuple<Thr, Thrs>, tuple<Val, Rest>>,
           tuple<tuple<ThrStride, ThrsStride>, tuple<ValStride, RestStride>>>> {
  static Partition read() {
    Partition part{{read_mode<Thr, ThrStride>()}, {read_mode<Val, ValStride>()}};
    std::vector<Mode> const threads = ReadModes<Thrs, ThrsStride>::read();
    std::vector<Mode> const rest = ReadModes<Rest, RestStride>::read();
    part.threads.insert(part.threads.end(), threads.begin(), threads.end());
    part.values.insert(part.values.end(), rest.begin(), rest.end());
    return part;
  }
};

// --- To arrays ------------------------------------------------------------------------------------------

// (modes...) -> index
inline Array index_array(StaticLayout const& layout) {
  Array array;
  int count = 1;
  for (Mode const& mode : layout.modes) {
    array.shape.push_back(size_of(mode));
    count *= array.shape.back();
  }
  array.data.reserve(count);
  for (int i = 0; i < count; ++i) {
    int rest = i, index = 0;
    for (Mode const& mode : layout.modes) {
      index += at(mode, rest % size_of(mode)).axis[0];
      rest /= size_of(mode);
    }
    array.data.push_back(layout.swizzle(index));
  }
  return array;
}

// (2, modes..., thread) -> coordinates; `first[thread]` is where the thread's part begins.
inline Array coord_array(std::vector<Coord> const& first, std::vector<Mode> const& modes) {
  Array array{{2}, {}};
  int count = 1;
  for (Mode const& mode : modes) {
    array.shape.push_back(size_of(mode));
    count *= array.shape.back();
  }
  array.shape.push_back(int(first.size()));
  array.data.reserve(2 * count * first.size());
  for (Coord const& begin : first) {
    for (int i = 0; i < count; ++i) {
      int rest = i;
      Coord sum = begin;
      for (Mode const& mode : modes) {
        Coord const part = at(mode, rest % size_of(mode));
        sum.axis[0] += part.axis[0];
        sum.axis[1] += part.axis[1];
        rest /= size_of(mode);
      }
      array.data.push_back(sum.axis[0]);
      array.data.push_back(sum.axis[1]);
    }
  }
  return array;
}

inline Array copy_array(Partition const& part) {
  std::vector<Coord> first;
  for (int thread = 0; thread < size_of(part.threads[0]); ++thread) first.push_back(at(part.threads[0], thread));
  return coord_array(first, part.values);
}

// The threads are those of get_thr_layout_vmnk; the operand has its V and two of its M, N, K.
inline Array mma_array(Partition const& part, StaticLayout const& threads_vmnk, int axis0, int axis1) {
  int threads = 1;
  for (Mode const& mode : threads_vmnk.modes) threads *= size_of(mode);
  std::vector<Coord> first(threads);
  for (int i = 0; i < threads; ++i) {
    int coord[4], rest = i, thread = 0;
    for (int axis = 0; axis < 4; ++axis) {
      Mode const& mode = threads_vmnk.modes[axis];
      coord[axis] = rest % size_of(mode);
      rest /= size_of(mode);
      thread += at(mode, coord[axis]).axis[0];
    }
    int const parts[3] = {coord[0], coord[axis0], coord[axis1]};
    for (int part_index = 0; part_index < 3; ++part_index) {
      Coord const begin = at(part.threads[part_index], parts[part_index]);
      first[thread].axis[0] += begin.axis[0];
      first[thread].axis[1] += begin.axis[1];
    }
  }
  return coord_array(first, part.values);
}

// --- Entries: what a kernel's description function returns ------------------------------------------------

template <size_t kSize>
struct Name {
  char text[kSize];
  constexpr Name(char const (&literal)[kSize]) { std::copy_n(literal, kSize, text); }
};

// Register numbers, or elements' offsets in a buffer.
template <Name kName, class Layout>
struct IndexEntry {
  static void add(Details& details) { details.arrays[kName.text] = index_array(ReadLayout<Layout>::read()); }
};

// A tensor in shared memory.
template <Name kName, class Layout>
struct SmemEntry {
  static void add(Details& details) {
    StaticLayout const layout = ReadLayout<Layout>::read();
    details.arrays[kName.text] = index_array(layout);
    details.swizzles[kName.text] = {layout.bits, layout.base, layout.shift};
  }
};

template <Name kName, class Layout>
struct CopyEntry {
  static void add(Details& details) { details.arrays[kName.text] = copy_array(ReadPartition<Layout>::read()); }
};

template <Name kName, class Layout, class Threads, int kAxis0, int kAxis1>
struct MmaEntry {
  static void add(Details& details) {
    details.arrays[kName.text] =
        mma_array(ReadPartition<Layout>::read(), ReadLayout<Threads>::read(), kAxis0, kAxis1);
  }
};

// An operand that the MMA reads from shared memory itself: every thread has all of it.
template <Name kName, class Layout>
struct SharedOperandEntry {
  static void add(Details& details) {
    details.arrays[kName.text] = coord_array({Coord{}}, ReadPartition<Layout>::read().values);
  }
};

template <Name kName, class Layout>
auto index_entry(Layout const&) {
  return tuple<IndexEntry<kName, Layout>>{};
}
template <Name kName, class Layout>
auto smem_entry(Layout const&) {
  return tuple<SmemEntry<kName, Layout>>{};
}
template <Name kName, class Layout>
auto copy_entry(Layout const&) {
  return tuple<CopyEntry<kName, Layout>>{};
}
template <Name kName, class Mma, class Layout>
auto mma_a_entry(Mma const& mma, Layout const& identity) {
  using Thr = decltype(mma.get_thr_layout_vmnk());
  return tuple<MmaEntry<kName, decltype(mma.thrfrg_A(identity)), Thr, 1, 3>>{};
}
template <Name kName, class Mma, class Layout>
auto mma_b_entry(Mma const& mma, Layout const& identity) {
  using Thr = decltype(mma.get_thr_layout_vmnk());
  return tuple<MmaEntry<kName, decltype(mma.thrfrg_B(identity)), Thr, 2, 3>>{};
}
template <Name kName, class Mma, class Layout>
auto mma_c_entry(Mma const& mma, Layout const& identity) {
  using Thr = decltype(mma.get_thr_layout_vmnk());
  return tuple<MmaEntry<kName, decltype(mma.thrfrg_C(identity)), Thr, 1, 2>>{};
}

template <Name kName, class Mma, class Layout>
auto shared_a_entry(Mma const& mma, Layout const& identity) {
  return tuple<SharedOperandEntry<kName, decltype(mma.thrfrg_A(identity))>>{};
}
template <Name kName, class Mma, class Layout>
auto shared_b_entry(Mma const& mma, Layout const& identity) {
  return tuple<SharedOperandEntry<kName, decltype(mma.thrfrg_B(identity))>>{};
}

template <class Entries>
struct AddAll;
template <class... Entries>
struct AddAll<tuple<Entries...>> {
  static void add(Details& details) { (Entries::add(details), ...); }
};

// The shape of one MMA instruction.
template <class AtomShape>
void add_atom(Details& out) {
  out.facts["mma.m"] = size<0>(AtomShape{});
  out.facts["mma.n"] = size<1>(AtomShape{});
  out.facts["mma.k"] = size<2>(AtomShape{});
}

// Whether two tiled MMAs share out their operands and results alike.
template <class Mma, class Other>
constexpr bool kSameMma = std::is_same_v<decltype(Mma{}.get_layoutA_TV()), decltype(Other{}.get_layoutA_TV())> &&
                          std::is_same_v<decltype(Mma{}.get_layoutB_TV()), decltype(Other{}.get_layoutB_TV())> &&
                          std::is_same_v<decltype(Mma{}.get_layoutC_TV()), decltype(Other{}.get_layoutC_TV())>;

}  // namespace inspect
