// The kernels of one source, handed to Python.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "registry.h"

namespace py = pybind11;

void add_all(Registry& registry);  // generated

namespace {

Registry const& registry() {
  static Registry const kernels = [] {
    Registry all;
    add_all(all);
    return all;
  }();
  return kernels;
}

py::array_t<int> to_numpy(Array const& array) {
  py::array_t<int, py::array::f_style> result(array.shape);
  std::copy(array.data.begin(), array.data.end(), result.mutable_data());
  return result;
}

Problem to_problem(py::dict problem) {
  auto get = [&](char const* name) { return problem[name].cast<int>(); };
  return {get("batch"), get("heads_q"), get("heads_kv"), get("len_q"),
          get("len_k"), get("head_dim"), get("lower"),   get("upper")};
}

PackedProblem to_packed_problem(py::dict problem) {
  auto get = [&](char const* name) { return problem[name].cast<int>(); };
  return {problem["cu_q"].cast<std::vector<int>>(),
          problem["cu_k"].cast<std::vector<int>>(),
          get("heads_q"),
          get("heads_kv"),
          get("head_dim"),
          get("window_left"),
          get("window_right"),
          get("bottom_right") != 0};
}

py::list kernels() {
  py::list all;
  for (Kernel const& kernel : registry()) {
    py::dict entry;
    entry["arch"] = kernel.arch;
    entry["folder"] = kernel.folder;
    entry["entry"] = kernel.entry;
    entry["entry_index"] = kernel.entry_index;
    entry["head_dim"] = kernel.head_dim;
    entry["tile"] = kernel.tile;
    entry["shape"] = kernel.shape;
    entry["facts"] = kernel.facts;
    all.append(entry);
  }
  return all;
}

py::dict describe(size_t index) {
  Details const details = registry().at(index).describe();
  py::list buffers;
  for (Buffer const& buffer : details.buffers) {
    buffers.append(py::make_tuple(buffer.name, buffer.offset, buffer.bytes));
  }
  py::dict arrays;
  for (auto const& [name, array] : details.arrays) arrays[py::str(name)] = to_numpy(array);
  py::dict result;
  result["buffers"] = buffers;
  result["facts"] = details.facts;
  result["swizzles"] = details.swizzles;
  result["arrays"] = arrays;
  return result;
}

}  // namespace

PYBIND11_MODULE(_traits, module) {
  module.def("kernels", &kernels);
  module.def("describe", &describe);
  module.def("schedule", [](size_t index, py::dict problem, int num_sms) {
    return to_numpy(registry().at(index).schedule(to_problem(problem), num_sms));
  });
  module.def("packed_schedule", [](size_t index, py::dict problem, int num_sms) {
    Kernel const& kernel = registry().at(index);
    if (kernel.packed_schedule == nullptr) throw py::value_error("no kernel of packed batches has this tile");
    return to_numpy(kernel.packed_schedule(to_packed_problem(problem), num_sms));
  });
  module.def("masked", [](size_t index, py::dict problem, int m_block, int n_block) {
    return to_numpy(registry().at(index).masked(to_problem(problem), m_block, n_block));
  });
}
