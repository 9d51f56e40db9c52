// Translated kernels by name; each registers itself when its library is loaded.
#include <map>

#include "emulator.h"

namespace emu {
namespace {

std::map<std::string, KernelInfo>& kernels() {
  static std::map<std::string, KernelInfo> all;
  return all;
}

}  // namespace

Registrar::Registrar(const char* name, KernelInfo info) { kernels()[name] = info; }

const KernelInfo* find_kernel(const std::string& name) {
  const auto it = kernels().find(name);
  return it == kernels().end() ? nullptr : &it->second;
}

}  // namespace emu
