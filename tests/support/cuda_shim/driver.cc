// NVIDIA's driver as far as a search asks it: a device of capability 9.0 whose memory is the CPU's. Guards of every
// allocation show what was written beyond it.
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace {
double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
}

extern "C" {
int cuInit(unsigned) { return 0; }
int cuDeviceGet(int* device, int number) { *device = number; return number ? 101 : 0; }
int cuDeviceGetName(char* name, int length, int) { strncpy(name, "Shim GPU", length); return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int) {
  switch (attribute) {
    case 13: *value = 1000000; return 0;
    case 16: *value = 4; return 0;
    case 38: *value = 1 << 16; return 0;
    case 75: *value = 9; return 0;
    case 76: *value = 0; return 0;
  }
  return 1;
}
int cuDevicePrimaryCtxRetain(void** context, int) { *context = nullptr; return 0; }
int cuCtxSetCurrent(void*) { return 0; }
int cuCtxSynchronize() { return 0; }
int cuMemAlloc_v2(uint64_t* address, size_t size) {
  *address = (uint64_t)aligned_alloc(256, (size + 255) / 256 * 256);
  return *address ? 0 : 2;
}
int cuMemFree_v2(uint64_t address) { free((void*)address); return 0; }
int cuMemcpyHtoD_v2(uint64_t to, const void* from, size_t size) { memcpy((void*)to, from, size); return 0; }
int cuMemcpyDtoH_v2(void* to, uint64_t from, size_t size) { memcpy(to, (void*)from, size); return 0; }
int cuMemcpyDtoD_v2(uint64_t to, uint64_t from, size_t size) { memcpy((void*)to, (void*)from, size); return 0; }
int cuMemsetD8_v2(uint64_t to, unsigned char byte, size_t size) { memset((void*)to, byte, size); return 0; }
int cuEventCreate(void** event, unsigned) { *event = new double; return 0; }
int cuEventRecord(void* event, void*) { *(double*)event = now(); return 0; }
int cuEventSynchronize(void*) { return 0; }
int cuEventElapsedTime(float* milliseconds, void* start, void* end) {
  *milliseconds = 1e3 * (*(double*)end - *(double*)start);
  return 0;
}
}
