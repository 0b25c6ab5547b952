// Artifacts from C++17: read manifests, choose, verify, load, call. Header only; see docs/c.md.
//
//   tvm_deconv::Library library("artifacts");                    // or a file of "tvm-deconv pack"
//   tvm_deconv::Layer layer = library.bind("decoder.up0", filter, bias);
//   layer(data, out);
//
// Libraries are chosen among as the Python package chooses. What is loaded are the bytes that were verified, from memory.
#ifndef TVM_DECONV_LIBRARY_HPP_
#define TVM_DECONV_LIBRARY_HPP_

#include <gnu/libc-version.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "artifact.h"
#include "detail/json.hpp"
#include "detail/sha256.hpp"
#include "detail/store.hpp"
#include "error.hpp"

namespace tvm_deconv {

using Shape = std::vector<std::int64_t>;

// A type of elements, as DLPack has it: bfloat16 is a TDL_UINT of 16 bits.
struct Type {
  int code = TDL_FLOAT, bits = 32;

  static Type named(const std::string& name) {
    static const std::map<std::string, Type> types = {
        {"float64", {TDL_FLOAT, 64}}, {"float32", {TDL_FLOAT, 32}}, {"float16", {TDL_FLOAT, 16}},
        {"bfloat16", {TDL_UINT, 16}}, {"uint16", {TDL_UINT, 16}},   {"int32", {TDL_INT, 32}},
        {"int16", {TDL_INT, 16}},     {"int8", {TDL_INT, 8}},       {"uint8", {TDL_UINT, 8}}};
    const auto found = types.find(name);
    if (found == types.end()) throw Error("dtype=" + name + ": is not known to this version");
    return found->second;
  }
};

inline std::size_t bytes_of(const Shape& shape, Type type) {
  std::size_t bytes = static_cast<std::size_t>(type.bits) / 8;
  for (std::int64_t extent : shape) bytes *= static_cast<std::size_t>(extent);
  return bytes;
}

// What the key of a problem says of its arrays. An extent of -1 is that of each call. The filter of a quantized problem
// comes without zero points, and the table of its numbers stands in the place of the bias (docs/c.md).
struct Problem {
  Shape data_shape, filter_shape, bias_shape;  // the filter's is [G, Ci, Co, *K]; no bias has no axis
  Type type, filter_type, output_type, bias_type;
  bool quantized = false;
  double largest_sum = 0;  // of a quantized problem, without the bias

  // The shape of the output for data of this shape. Throws Error if that does not fit.
  Shape output_shape(const Shape& data) const {
    bool fits = data.size() == data_shape.size();
    for (std::size_t axis = 0; fits && axis < data.size(); ++axis)
      fits = data[axis] >= 0 && (data_shape[axis] == -1 || data_shape[axis] == data[axis]);
    if (!fits) throw Error("data: must have a shape that the problem permits");
    Shape output(data);
    output[channel_axis_] = channels_;
    for (std::size_t axis = 0; axis < strides_.size(); ++axis) {
      const std::size_t at = axis + (channel_axis_ == 1 ? 2 : 1);
      output[at] = dynamic_[axis] ? strides_[axis] * (data[at] - 1) + output_[axis] : output_[axis];
      if (output[at] < 0) throw Error("data: has so small an extent that the output would have a negative one");
    }
    return output;
  }

  static Problem parsed(const std::string& key) {
    static const std::regex form(
        R"(n(\d+|any)-g(\d+)-i(\d+)-o(\d+)-x((?:any(?:\(\d+(?:,\d+)*\))?|[\dx])+)-k([\dx]+)-s([\dx]+)-d([\dx]+)-p[\dx]+)"
        R"(-y((?:any[+-]|[\dx])+)-([a-z0-9]+)(?:\+[a-z0-9]+)?(?:\.(u?int8)\.([a-z0-9]+))?-(NCX|NXC)-GIOX-(\S+))");
    std::smatch found;
    if (key.size() > 1000 || !std::regex_match(key, found, form)) throw Error("problem=" + key + ": must be a key");
    const std::int64_t groups = integer(found[2]), in = integer(found[3]), out = integer(found[4]);
    const Shape spatial = extents(found[5]), kernel = extents(found[6]);
    Problem problem;
    problem.strides_ = extents(found[7]);
    const Shape dilations = extents(found[8]);
    problem.output_ = extents(found[9], &problem.dynamic_);
    if (kernel.size() != spatial.size() || problem.strides_.size() != spatial.size() ||
        dilations.size() != spatial.size() || problem.output_.size() != spatial.size())
      throw Error("problem=" + key + ": must have as many extents everywhere");
    for (const Shape& shape : {spatial, kernel, problem.strides_, problem.output_, Shape{groups, in}, Shape{groups, out}})
      check_size(shape);
    problem.channels_ = groups * out;
    problem.channel_axis_ = found[13] == "NCX" ? 1 : 1 + spatial.size();
    problem.data_shape = spatial;
    problem.data_shape.insert(problem.data_shape.begin(), found[1] == "any" ? -1 : integer(found[1]));
    problem.data_shape.insert(problem.data_shape.begin() + static_cast<std::ptrdiff_t>(problem.channel_axis_),
                              groups * in);
    problem.filter_shape = {groups, in, out};
    problem.filter_shape.insert(problem.filter_shape.end(), kernel.begin(), kernel.end());
    check_size(problem.data_shape);
    check_size(problem.filter_shape);
    const std::string epilogue = found[14];
    if (epilogue == "bias" || epilogue.compare(0, 5, "bias+") == 0) problem.bias_shape = {problem.channels_};
    problem.type = Type::named(found[10]);
    const bool floating = found[10] == "bfloat16" || problem.type.code == TDL_FLOAT;
    problem.filter_type = problem.type;
    problem.output_type = floating ? problem.type : Type{TDL_INT, 32};
    problem.bias_type = floating ? Type{TDL_FLOAT, std::max(problem.type.bits, 32)} : Type{TDL_INT, 32};
    if (found[11].matched) {
      problem.quantized = true;
      problem.filter_type = found[11] == "int8" ? Type{TDL_INT, 8} : Type{TDL_INT, 16};
      problem.largest_sum = 255.0 * (found[11] == "int8" ? 128 : 255) * static_cast<double>(in);
      for (std::size_t axis = 0; axis < kernel.size(); ++axis) {
        const std::int64_t step = problem.strides_[axis] / std::gcd(problem.strides_[axis], dilations[axis]);
        if (step < 1) throw Error("problem=" + key + ": must have positive strides");
        problem.largest_sum *= static_cast<double>((kernel[axis] + step - 1) / step);
      }
      problem.output_type = Type::named(found[12]);
      problem.bias_shape = {3 + 2 * problem.channels_};
    }
    return problem;
  }

 private:
  // Extents joined by x; "any", with buckets or without, is -1 among data, and its constant among outputs.
  static Shape extents(const std::string& text, std::vector<bool>* dynamic = nullptr) {
    Shape found;
    std::istringstream parts(text);
    for (std::string part; std::getline(parts, part, 'x');) {
      const bool any = part.compare(0, 3, "any") == 0;
      if (dynamic) dynamic->push_back(any);
      found.push_back(any && !dynamic ? -1 : integer(any ? part.substr(3) : part));
    }
    return found;
  }

  static std::int64_t integer(const std::string& text) {
    if (text.size() > 18 || text.find_first_of("0123456789") == std::string::npos)
      throw Error("extent=" + text + ": must be an integer of 64 bits");
    return std::strtoll(text.c_str(), nullptr, 10);
  }

  static void check_size(const Shape& shape) {
    double elements = 1;
    for (std::int64_t extent : shape) elements *= static_cast<double>(extent < 1 ? 1 : extent);
    if (elements > 1e17) throw Error("shape: must have a size that fits in 64 bits");
  }

  Shape strides_, output_;
  std::vector<bool> dynamic_;
  std::int64_t channels_ = 0;
  std::size_t channel_axis_ = 1;
};

// The numbers of a quantized layer: a stored q stands for scale * (q - zero point), as tvm_deconv.Scaling has them.
struct Scaling {
  double data_scale = 1;
  std::int64_t data_zero_point = 0;
  std::vector<double> filter_scale = {1};  // one, or one for each output channel
  double output_scale = 1;
  std::int64_t output_zero_point = 0;

  // The table that Library::bind takes in the place of the bias. `bias` has an element for each output channel, or is
  // null. Throws Error for numbers that break a rule.
  std::vector<std::int32_t> table(const Problem& problem, const std::int32_t* bias) const {
    if (!problem.quantized) throw Error("scaling: must be left out: the problem is not quantized");
    const std::size_t channels = (static_cast<std::size_t>(problem.bias_shape[0]) - 3) / 2;
    check("data_scale", data_scale);
    check("output_scale", output_scale);
    const bool stored = problem.output_type.bits == 8;
    if (!stored && output_scale != 1) throw Error("output_scale: must be 1: the output is not quantized");
    if (filter_scale.size() != 1 && filter_scale.size() != channels)
      throw Error("filter_scale: must be one number or have one for each output channel, " + std::to_string(channels) +
                  " here");
    std::vector<std::int32_t> made = {zero_point("data_zero_point", data_zero_point, problem.type),
                                      zero_point("output_zero_point", output_zero_point, problem.output_type),
                                      bits(1 / output_scale)};
    for (std::size_t channel = 0; channel < channels; ++channel) {
      const std::int32_t value = bias ? bias[channel] : 0;
      if (problem.largest_sum + std::abs(static_cast<double>(value)) > 2147483647.0)
        throw Error("bias=" + std::to_string(value) + ": must keep sums within 32 bits");
      made.push_back(value);
    }
    for (std::size_t channel = 0; channel < channels; ++channel) {
      const double scale = filter_scale[filter_scale.size() == 1 ? 0 : channel];
      check("filter_scale", scale);
      made.push_back(bits(scale * data_scale));
    }
    return made;
  }

 private:
  static void check(const char* name, double scale) {
    if (!(scale >= 0x1p-60 && scale <= 0x1p40))
      throw Error(std::string(name) + "=" + std::to_string(scale) + ": must be from 2**-60 to 2**40");
  }

  static std::int32_t zero_point(const char* name, std::int64_t value, Type type) {
    const std::int64_t most = type.bits != 8 ? 0 : type.code == TDL_UINT ? 255 : 127;
    const std::int64_t least = type.bits == 8 && type.code == TDL_INT ? -128 : 0;
    if (value < least || value > most)
      throw Error(std::string(name) + "=" + std::to_string(value) + ": must be from " + std::to_string(least) + " to " +
                  std::to_string(most));
    return static_cast<std::int32_t>(value);
  }

  static std::int32_t bits(double value) {
    const float rounded = static_cast<float>(value);
    std::int32_t found;
    std::memcpy(&found, &rounded, sizeof found);
    return found;
  }
};

// The facts of an artifact, as docs/reliability.md describes them.
struct Manifest {
  std::string name, problem, target, library, sha256, packed_dtype, origin;
  std::vector<std::string> layers, features;
  std::map<std::string, std::string> needs;
  std::uint64_t size = 0, scratch_bytes = 0, shared_bytes = 0;
  Shape packed_shape;

  // Reads the text of the manifest called `name`. Throws Error.
  static Manifest parsed(const std::string& name, const std::string& text) {
    static constexpr std::int64_t newest = 2, largest = std::int64_t{1} << 30;
    const detail::Json root = detail::JsonReader(text).read();
    if (integer(root, "format") > newest)
      throw Error("format: must be at most " + std::to_string(newest) + ": a newer version wrote it");
    Manifest manifest;
    manifest.name = name;
    for (auto [field, value] : {std::pair{"problem", &manifest.problem}, {"target", &manifest.target},
                                {"library", &manifest.library}, {"sha256", &manifest.sha256},
                                {"packed_dtype", &manifest.packed_dtype}, {"origin", &manifest.origin}})
      *value = member(root, field, detail::Json::Kind::text).text;
    manifest.layers = texts(root, "layers");
    manifest.features = texts(root, "features");
    if (root.fields.count("needs"))
      for (const auto& [family, version] : member(root, "needs", detail::Json::Kind::object).fields)
        manifest.needs[family] = version.text;
    for (const detail::Json& extent : member(root, "packed_shape", detail::Json::Kind::list).items) {
      if (extent.kind != detail::Json::Kind::integer || extent.integer < 0 || extent.integer > largest * 64)
        throw Error("packed_shape: must be a list of extents");
      manifest.packed_shape.push_back(extent.integer);
    }
    manifest.size = unsigned_integer(root, "size");
    manifest.scratch_bytes = unsigned_integer(root, "scratch_bytes");
    manifest.shared_bytes = unsigned_integer(root, "shared_bytes");
    if (manifest.size > static_cast<std::uint64_t>(largest)) throw Error("size: must be at most a gibibyte");
    if (manifest.sha256.size() != 64 || manifest.library != name + "." + manifest.sha256.substr(0, 16) + ".so")
      throw Error("library: must be what problem, target and sha256 decide");
    Type::named(manifest.packed_dtype);
    Problem::parsed(manifest.problem);
    return manifest;
  }

 private:
  static const detail::Json& member(const detail::Json& root, const char* name, detail::Json::Kind kind) {
    const auto found = root.fields.find(name);
    if (root.kind != detail::Json::Kind::object || found == root.fields.end() || found->second.kind != kind)
      throw Error(std::string(name) + ": is missing, or of another kind");
    return found->second;
  }

  static std::int64_t integer(const detail::Json& root, const char* name) {
    return member(root, name, detail::Json::Kind::integer).integer;
  }

  static std::uint64_t unsigned_integer(const detail::Json& root, const char* name) {
    const std::int64_t value = integer(root, name);
    if (value < 0) throw Error(std::string(name) + ": must be at least 0");
    return static_cast<std::uint64_t>(value);
  }

  static std::vector<std::string> texts(const detail::Json& root, const char* name) {
    std::vector<std::string> found;
    for (const detail::Json& item : member(root, name, detail::Json::Kind::list).items) {
      if (item.kind != detail::Json::Kind::text) throw Error(std::string(name) + ": must be a list of strings");
      found.push_back(item.text);
    }
    return found;
  }
};

// The CPU flags that all processors of this machine have, and the versions of its libraries.
struct Host {
  std::set<std::string> features;
  std::map<std::string, std::string> libraries;

  static Host detected(const char* cpuinfo = "/proc/cpuinfo") {
    Host host;
    std::ifstream file(cpuinfo);
    bool first = true;
    for (std::string line; std::getline(file, line);) {
      if (line.compare(0, 5, "flags") != 0 || line.find(':') == std::string::npos) continue;
      std::istringstream words(line.substr(line.find(':') + 1));
      const std::set<std::string> flags{std::istream_iterator<std::string>(words), {}};
      std::set<std::string> common;
      std::set_intersection(flags.begin(), flags.end(), host.features.begin(), host.features.end(),
                            std::inserter(common, common.end()));
      host.features = first ? flags : common;
      first = false;
    }
    if (host.features.count("amx_tile") != 0 && !permits_amx()) {
      for (const char* flag : {"amx_bf16", "amx_int8", "amx_tile"}) host.features.erase(flag);
    }
    host.libraries["GLIBC"] = gnu_get_libc_version();
    return host;
  }

  // Asks the kernel to let this process use AMX.
  static bool permits_amx() {
    constexpr long request_permission = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
  }
};

// Whether an artifact can serve here, and why.
struct Decision {
  const Manifest* manifest;
  bool accepted;
  std::string reason;
};

// A filter bound to its artifact. It may be copied, and called from several threads.
class Layer {
 public:
  Layer(const Manifest& manifest, const tdl_artifact& artifact, const void* filter, const void* bias)
      : problem_(Problem::parsed(manifest.problem)), artifact_(artifact), packed_shape_(manifest.packed_shape),
        packed_type_(Type::named(manifest.packed_dtype)) {
    packed_ = memory(bytes_of(packed_shape_, packed_type_));
    const tdl_tensor weights = array(filter, problem_.filter_type, problem_.filter_shape), packed = packed_array();
    char error[1024];
    if (tdl_pack(&artifact_, &weights, &packed, error, sizeof error)) throw Error(error);
    if (problem_.bias_shape.empty() != (bias == nullptr))
      throw Error(bias ? "bias: must be null: the problem has none" : "bias: must be given: the problem has one");
    if (bias == nullptr) return;
    const std::size_t size = bytes_of(problem_.bias_shape, problem_.bias_type);
    bias_ = memory(size);
    std::memcpy(bias_.get(), bias, size);
  }

  const Problem& problem() const { return problem_; }

  // Computes `out` from `data`, of the problem's shapes. Up to `threads` threads compute; 0: as many as are set.
  void operator()(const void* data, void* out, int threads = 0) const { call(data, problem_.data_shape, out, threads); }

  // Computes `out`, of shape problem().output_shape(shape), from `data` of this `shape`. Throws Error.
  void call(const void* data, const Shape& shape, void* out, int threads = 0) const {
    const Shape output_shape = problem_.output_shape(shape);
    if (!bytes_of(output_shape, problem_.output_type)) return;
    const tdl_tensor given = array(data, problem_.type, shape), packed = packed_array();
    const tdl_tensor output = array(out, problem_.output_type, output_shape);
    const tdl_tensor bias = array(bias_.get(), problem_.bias_type, problem_.bias_shape);
    char error[1024];
    if (tdl_call(&artifact_, &given, &packed, bias_ ? &bias : nullptr, &output, threads, nullptr, error, sizeof error))
      throw Error(error);
  }

 private:
  static tdl_tensor array(const void* data, Type type, const Shape& shape) {
    return tdl_array(data, type.code, type.bits, static_cast<int>(shape.size()), shape.data());
  }

  tdl_tensor packed_array() const { return array(packed_.get(), packed_type_, packed_shape_); }

  static std::shared_ptr<void> memory(std::size_t bytes) {
    std::shared_ptr<void> found(std::aligned_alloc(64, (bytes / 64 + 1) * 64), std::free);
    if (!found) throw std::bad_alloc();
    return found;
  }

  Problem problem_;
  tdl_artifact artifact_;
  Shape packed_shape_;
  Type packed_type_;
  std::shared_ptr<void> packed_, bias_;
};

// The artifacts of a directory, or of a file of "tvm-deconv pack".
class Library {
 public:
  // Reads the manifests at `path`; no library is opened. With `digest`, that of "tvm-deconv inspect", only those
  // artifacts are loaded. Throws Error.
  explicit Library(const std::string& path, const std::string& digest = "", Host host = Host::detected())
      : store_(path), host_(std::move(host)) {
    static const std::regex form(R"(([0-9a-f]{16}-[A-Za-z0-9][A-Za-z0-9._+-]*)\.json)");
    detail::Sha256 all;
    for (const std::string& file : store_.names()) {
      std::smatch found;
      if (!std::regex_match(file, found, form)) continue;
      try {
        const std::string text = store_.read(file, 1u << 20);
        manifests_.push_back(Manifest::parsed(found[1], text));
        all.update(file + std::string(1, '\0') + detail::bytes_of(detail::sha256(text)));
      } catch (const Error& error) {
        broken_[found[1]] = error.what();
      }
    }
    digest_ = "sha256:" + detail::hexadecimal(all.digest());
    if (!digest.empty() && digest != digest_)
      throw Error("digest=" + digest_ + ": must be " + digest + ", which was asked for");
  }

  const std::vector<Manifest>& manifests() const { return manifests_; }
  const std::map<std::string, std::string>& broken() const { return broken_; }  // errors of manifests, by name
  const std::string& digest() const { return digest_; }

  // The decision on every artifact for `wanted`, a problem's key or the name of a layer; the best comes first.
  std::vector<Decision> select(const std::string& wanted) const {
    std::vector<std::pair<Rank, Decision>> ranked;
    const std::string exact = without_precision(wanted);
    for (const Manifest& manifest : manifests_) {
      const bool named = std::count(manifest.layers.begin(), manifest.layers.end(), wanted) > 0;
      if (!named && manifest.problem != wanted && manifest.problem != exact) continue;
      const std::string refusal = refused(manifest);
      std::ptrdiff_t dynamic = 0;
      for (std::size_t at = 0; (at = manifest.problem.find("any", at)) != std::string::npos; at += 3) ++dynamic;
      const Rank rank{!refusal.empty(), -static_cast<std::ptrdiff_t>(manifest.features.size()), dynamic,
                      manifest.origin != "tuned", manifest.name};
      ranked.push_back({rank, {&manifest, refusal.empty(), refusal.empty() ? "serves " + wanted : refusal}});
    }
    std::sort(ranked.begin(), ranked.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    std::vector<Decision> decisions;
    for (auto& [rank, decision] : ranked) decisions.push_back(decision);
    return decisions;
  }

  // The manifest of the best artifact for `wanted`. Throws Error, with the reasons of all, if none can serve.
  const Manifest& best(const std::string& wanted) const {
    const std::vector<Decision> decisions = select(wanted);
    if (!decisions.empty() && decisions[0].accepted) return *decisions[0].manifest;
    std::string why = wanted + ": no artifact serves it";
    for (const Decision& decision : decisions) why += "\n  " + decision.manifest->name + ": " + decision.reason;
    for (const auto& [name, error] : broken_) why += "\n  " + name + ": " + error;
    throw Error(why);
  }

  // Verifies and loads the best artifact for `wanted`, packs `filter`, of shape [G, Ci, Co, *K], and copies `bias`,
  // which is null if the problem has none. Throws Error.
  Layer bind(const std::string& wanted, const void* filter, const void* bias = nullptr) const {
    const Manifest& manifest = best(wanted);
    return Layer(manifest, load(manifest), filter, bias);
  }

 private:
  using Rank = std::tuple<bool, std::ptrdiff_t, std::ptrdiff_t, bool, std::string>;

  // Why an artifact does not run here; empty if it does.
  std::string refused(const Manifest& manifest) const {
    if (manifest.target.compare(0, 4, "cuda") == 0) return "runs on CUDA devices; this loader is for CPUs";
    std::string missing;
    for (const std::string& flag : manifest.features)
      if (!host_.features.count(flag)) missing += (missing.empty() ? "" : ", ") + flag;
    if (!missing.empty()) return "needs CPU flags that this host lacks: " + missing;
    for (const auto& [family, version] : manifest.needs) {
      const auto here = host_.libraries.find(family);
      if (here != host_.libraries.end() && numbers(here->second) < numbers(version))
        return "needs " + family + " " + version + "; this machine has " + here->second;
    }
    return "";
  }

  // The key of the problem that CPUs compute for one that permits TF32.
  static std::string without_precision(const std::string& key) {
    static const std::regex form(R"(-float32\+tf32(?:x3)?-)");
    return key.size() > 1000 ? key : std::regex_replace(key, form, "-float32-");
  }

  static Shape numbers(const std::string& version) {
    Shape found;
    std::istringstream parts(version);
    for (std::string part; std::getline(parts, part, '.');) found.push_back(std::strtoll(part.c_str(), nullptr, 10));
    return found;
  }

  // Returns the open artifact of a manifest, once per content and process; the bytes are those that were verified.
  tdl_artifact load(const Manifest& manifest) const {
    static std::mutex lock;
    static std::map<std::string, tdl_artifact> opened;
    const std::string place = store_.path() + "/" + manifest.library;
    const std::string bytes = store_.read(manifest.library, manifest.size + 1);
    if (bytes.size() != manifest.size)
      throw Error(place + ": must have " + std::to_string(manifest.size) + " bytes, which the manifest says");
    if (detail::hexadecimal(detail::sha256(bytes)) != manifest.sha256)
      throw Error(place + ": must have the SHA-256 that the manifest says: the file was altered or replaced");
    const std::lock_guard<std::mutex> held(lock);
    const auto found = opened.find(manifest.sha256);
    if (found != opened.end()) return found->second;
    // The descriptor stays open: the dynamic linker takes libraries of one path for one library.
    const int file = static_cast<int>(syscall(SYS_memfd_create, manifest.library.c_str(), 1u /* MFD_CLOEXEC */));
    std::size_t written = 0;
    while (file >= 0 && written < bytes.size()) {
      const ssize_t count = write(file, bytes.data() + written, bytes.size() - written);
      if (count <= 0) break;
      written += static_cast<std::size_t>(count);
    }
    char error[1024] = "there is no memory for the library";
    tdl_artifact artifact;
    const std::string path = "/proc/self/fd/" + std::to_string(file);
    if (written != bytes.size() || tdl_open(&artifact, path.c_str(), error, sizeof error)) {
      if (file >= 0) close(file);
      throw Error(place + ": " + error);
    }
    return opened[manifest.sha256] = artifact;
  }

  detail::Store store_;
  Host host_;
  std::vector<Manifest> manifests_;
  std::map<std::string, std::string> broken_;
  std::string digest_;
};

}  // namespace tvm_deconv

#endif  // TVM_DECONV_LIBRARY_HPP_
