// What this library's files would ask of a libstdc++ that is newer than those of the systems it is for. torch's wheels
// happen to export the same, but other torches need not.
#include <ios>
#include <new>
#include <sstream>
#include <string>

// Members of these that are new in some release of g++ are declared by its headers and defined in its libstdc++.
template class std::basic_string<char>;
template class std::basic_stringbuf<char>;
template class std::basic_istringstream<char>;
template class std::basic_ostringstream<char>;
template class std::basic_stringstream<char>;

namespace {
// For the second function below: an older libstdc++ makes std::cout and its siblings in the first of these objects.
std::ios_base::Init const streams;
}  // namespace

extern "C" {  // weak: a static libstdc++ defines them too

// std::__throw_bad_array_new_length, which allocators call from g++ 11 on.
[[noreturn, gnu::weak, gnu::visibility("hidden")]] void _ZSt28__throw_bad_array_new_lengthv() {
  throw std::bad_array_new_length();
}

// std::ios_base_library_init: from g++ 13 on, each file that includes <iostream> refers to it, and nothing calls it.
[[gnu::weak, gnu::visibility("hidden")]] void _ZSt21ios_base_library_initv() {}

}  // extern "C"
