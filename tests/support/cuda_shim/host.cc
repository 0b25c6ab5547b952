// What the host's code of every kernel has in common, compiled once.
#include "all.h"

int shim_raised() {
  try {
    throw;
  } catch (const tvm::ffi::Error& error) {
    tvm::ffi::details::SetSafeCallRaised(error);
  } catch (const std::exception& error) {
    tvm::ffi::details::SetSafeCallRaised(tvm::ffi::Error("InternalError", error.what(), ""));
  }
  return -1;
}

int shim_raise(const char* kind, const char* text) {
  TVMFFIErrorSetRaisedFromCStr(kind, text);
  return -1;
}

void ShimRefusal::operator<<(const char* text) const { throw tvm::ffi::Error(kind, text, ""); }
