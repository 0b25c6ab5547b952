// Lists the layers in a directory of artifacts or a packed file, or computes one from files of raw numbers.
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>

#include <tvm_deconv/library.hpp>

namespace {

std::vector<char> read(const std::string& path, std::size_t size) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw tvm_deconv::Error(path + ": must be a file that can be read");
  std::vector<char> bytes(std::istreambuf_iterator<char>(file), {});
  if (bytes.size() != size)
    throw tvm_deconv::Error(path + ": must have " + std::to_string(size) + " bytes, not " + std::to_string(bytes.size()));
  return bytes;
}

// What the manifests say: "serves" is of an artifact whose library is verified when a layer is bound.
void list(const std::string& path, const tvm_deconv::Library& library) {
  if (library.manifests().empty() && library.broken().empty()) throw tvm_deconv::Error(path + ": must hold an artifact");
  for (const tvm_deconv::Manifest& manifest : library.manifests()) {
    const tvm_deconv::Decision decision = library.select(manifest.problem).front();
    for (const std::string& layer : manifest.layers) std::cout << layer << (&layer == &manifest.layers.back() ? ": " : ", ");
    std::cout << manifest.problem << " for " << manifest.target << ": " << decision.reason << '\n';
  }
  for (const auto& [name, error] : library.broken()) std::cout << name << " is broken: " << error << '\n';
  std::cout << library.digest() << '\n';
}

tvm_deconv::Shape shape_of(const std::string& text) {
  tvm_deconv::Shape shape;
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, 'x');) shape.push_back(std::stoll(part));
  return shape;
}

// The numbers of a quantized layer: scale and zero point of data and of output, then the scales of the filter.
tvm_deconv::Scaling scaling_of(const std::string& text) {
  tvm_deconv::Scaling scaling;
  std::istringstream parts(text);
  parts >> scaling.data_scale >> scaling.data_zero_point >> scaling.output_scale >> scaling.output_zero_point;
  scaling.filter_scale.assign(std::istream_iterator<double>(parts), {});
  return scaling;
}

// Arguments: layer, files of data, filter, bias ("-" for none) and output, and the shape of the data if calls decide it.
// The bias of a quantized layer, whose filter comes without zero points, is int32.
void compute(const tvm_deconv::Library& library, const std::vector<std::string>& given) {
  const auto problem = tvm_deconv::Problem::parsed(library.best(given[0]).problem);
  const std::vector<char> filter = read(given[2], bytes_of(problem.filter_shape, problem.filter_type));
  const bool has_bias = given[3] != "-";
  tvm_deconv::Shape bias_shape = problem.bias_shape;
  if (problem.quantized) bias_shape = {(bias_shape[0] - 3) / 2};
  const std::vector<char> bias = has_bias ? read(given[3], bytes_of(bias_shape, problem.bias_type)) : std::vector<char>();
  const void* numbers = has_bias ? bias.data() : nullptr;
  std::vector<std::int32_t> table;
  if (const char* scaling = std::getenv("SCALING")) {
    table = scaling_of(scaling).table(problem, static_cast<const std::int32_t*>(numbers));
    numbers = table.data();
  }
  const tvm_deconv::Layer layer = library.bind(given[0], filter.data(), numbers);
  const tvm_deconv::Shape shape = given.size() > 5 ? shape_of(given[5]) : problem.data_shape;
  const tvm_deconv::Shape output_shape = problem.output_shape(shape);
  const std::vector<char> data = read(given[1], bytes_of(shape, problem.type));
  std::vector<char> out(bytes_of(output_shape, problem.output_type), '\x7f');
  layer.call(data.data(), shape, out.data());
  std::ofstream file(given[4], std::ios::binary);
  file.write(out.data(), static_cast<std::streamsize>(out.size()));
  file.close();
  if (!file) throw tvm_deconv::Error(given[4] + ": must be a file that can be written");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2 && argc != 7 && argc != 8) {
    std::cerr << "usage: " << argv[0] << " ARTIFACTS [LAYER DATA FILTER BIAS OUT [SHAPE]]\n";
    return 2;
  }
  try {
    const char* digest = std::getenv("DIGEST");
    const tvm_deconv::Library library(argv[1], digest ? digest : "");
    if (argc == 2)
      list(argv[1], library);
    else
      compute(library, {argv + 2, argv + argc});
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << '\n';
    return 1;
  }
}
