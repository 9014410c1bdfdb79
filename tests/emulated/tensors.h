// Tensors of random values on the host, whose rows have padding that no kernel may read or write.
#pragma once

#include <cmath>
#include <cstdint>
#include <random>
#include <stdexcept>
#include <vector>

#include "contract/params.h"

struct Random {
  std::mt19937_64 engine;

  explicit Random(uint64_t seed) : engine(seed) {}
  int range(int low, int high) { return low + int(engine() % uint64_t(high - low + 1)); }
  bool chance(double probability) { return double(engine() >> 11) * 0x1p-53 < probability; }
  float normal() { return std::normal_distribution<float>()(engine); }
};

// (batch, head, row, column); rows or heads may be outside in memory.
template <class Element>
class Tensor4 {
 public:
  Tensor4(Random& random, int batch, int heads, int rows, int columns)
      : sizes_{batch, heads, rows, columns} {
    int64_t const pitch = columns + (random.chance(0.5) ? 16 : 0);
    bool const heads_inside = random.chance(0.5);
    strides.row = heads_inside ? pitch * heads : pitch;
    strides.head = heads_inside ? pitch : pitch * rows;
    strides.batch = pitch * rows * heads;
    elements_.resize(size_t(strides.batch * batch) + 64, Element(NAN));
    for_each([&](Element& element) { element = Element(random.normal()); });
  }

  flash_cute::Strides strides{};

  Element* data() const { return aligned(elements_); }
  Element& at(int b, int h, int i, int d) { return data()[offset(b, h, i, d)]; }
  Element const& operator()(int b, int h, int i, int d) const { return data()[offset(b, h, i, d)]; }

  void poison() {
    for (Element& element : elements_) element = Element(NAN);
  }

  // Nothing but the tensor has been written.
  void check_padding() {
    for_each([&](Element& element) { element = Element(NAN); });
    for (Element const& element : elements_) {
      if (!std::isnan(float(element))) throw std::runtime_error("a kernel wrote outside of a tensor");
    }
  }

 private:
  static Element* aligned(std::vector<Element> const& elements) {
    auto const address = reinterpret_cast<uintptr_t>(elements.data());
    return reinterpret_cast<Element*>((address + 31) / 32 * 32);
  }
  size_t offset(int b, int h, int i, int d) const {
    return size_t(b * strides.batch + h * strides.head + i * strides.row + d);
  }
  template <class Do>
  void for_each(Do const& act) {
    for (int b = 0; b < sizes_[0]; ++b) {
      for (int h = 0; h < sizes_[1]; ++h) {
        for (int i = 0; i < sizes_[2]; ++i) {
          for (int d = 0; d < sizes_[3]; ++d) act(data()[offset(b, h, i, d)]);
        }
      }
    }
  }

  int sizes_[4];
  std::vector<Element> elements_;
};
