// NVIDIA's driver as far as a search asks it: a device of capability 9.0 whose memory is the CPU's. Guards of every
// allocation show what was written beyond it. Work is done as it is enqueued, unless its stream captures: then it becomes
// a node of a graph, and is done at each launch of that.
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <set>
#include <vector>

namespace {
double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
using Graph = std::vector<std::function<int()>>;
struct Stream { Graph* captured = nullptr; };
constexpr int not_permitted = 900;  // CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
int begun;  // captures that have not ended
std::set<const void*> loaded;  // kernels
std::set<void*> streams;
std::map<uint64_t, size_t> allocated;
size_t in_use;
// A number that a test lets the device say or have.
size_t number_of(const char* variable, size_t otherwise) {
  const char* text = getenv(variable);
  return text ? strtoull(text, nullptr, 10) : otherwise;
}
}

extern "C" {
int cuInit(unsigned) { return 0; }
int cuDeviceGet(int* device, int number) { *device = number; return number ? 101 : 0; }
int cuDeviceGetName(char* name, int length, int) { strncpy(name, "Shim GPU", length); return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int) {
  switch (attribute) {
    case 13: *value = 1000000; return 0;
    case 16: *value = 4; return 0;
    case 38: *value = (int)number_of("SHIM_LEVEL2", 1 << 16); return 0;
    case 75: *value = 9; return 0;
    case 76: *value = 0; return 0;
  }
  return 1;
}
int cuDevicePrimaryCtxRetain(void** context, int) { *context = nullptr; return 0; }
int cuCtxSetCurrent(void*) { return 0; }
int cuCtxSynchronize() { return begun ? not_permitted : 0; }
int cuMemAlloc_v2(uint64_t* address, size_t size) {
  if (in_use + size > number_of("SHIM_MEMORY", SIZE_MAX / 2)) return 2;
  *address = (uint64_t)aligned_alloc(256, (size + 255) / 256 * 256);
  if (!*address) return 2;
  in_use += allocated[*address] = size;
  return 0;
}
int cuMemFree_v2(uint64_t address) {
  in_use -= allocated[address];
  allocated.erase(address);
  free((void*)address);
  return 0;
}
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
int shim_graphs, shim_launches;  // graphs that are alive, launches of graphs so far
void shim_load(const void* kernel) { loaded.insert(kernel); }
bool shim_loaded(const void* kernel) { return loaded.count(kernel); }
void shim_unload() { loaded.clear(); }
// Returns whether `stream` captures; then the node is its.
bool shim_captures(void* stream) { return streams.count(stream) && static_cast<Stream*>(stream)->captured; }
void shim_node(void* stream, std::function<int()>* node) { static_cast<Stream*>(stream)->captured->push_back(*node); }
int cuStreamCreate(void** stream, unsigned) { streams.insert(*stream = new Stream); return 0; }
int cuStreamBeginCapture_v2(void* stream, int) {
  if (!stream || getenv("SHIM_NO_CAPTURE")) return not_permitted;
  static_cast<Stream*>(stream)->captured = new Graph;
  ++begun, ++shim_graphs;
  return 0;
}
int cuStreamEndCapture(void* stream, void** graph) {
  *graph = static_cast<Stream*>(stream)->captured;
  static_cast<Stream*>(stream)->captured = nullptr;
  --begun;
  return 0;
}
int cuGraphGetNodes(void* graph, void**, size_t* number) { *number = static_cast<Graph*>(graph)->size(); return 0; }
int cuGraphInstantiateWithFlags(void** executable, void* graph, unsigned long long) {
  ++shim_graphs;
  *executable = new Graph(*static_cast<Graph*>(graph));
  return 0;
}
int cuGraphUpload(void*, void*) { return 0; }
int cuGraphLaunch(void* executable, void*) {
  ++shim_launches;
  for (const auto& node : *static_cast<Graph*>(executable))
    if (int code = node()) return code;
  return 0;
}
int cuGraphDestroy(void* graph) {
  shim_graphs -= graph != nullptr;
  delete static_cast<Graph*>(graph);
  return 0;
}
int cuGraphExecDestroy(void* executable) { return cuGraphDestroy(executable); }
int cuEventDestroy_v2(void* event) { delete static_cast<double*>(event); return 0; }
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t size, void* stream) {
  std::function<int()> copy = [=] { return cuMemcpyDtoD_v2(to, from, size); };
  if (!shim_captures(stream)) return copy();
  shim_node(stream, &copy);
  return 0;
}
}
