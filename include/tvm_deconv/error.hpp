// The error of the C++ loader.
#ifndef TVM_DECONV_ERROR_HPP_
#define TVM_DECONV_ERROR_HPP_

#include <stdexcept>

namespace tvm_deconv {

// What artifacts, files and calls are refused for; the text names the thing that is wrong and the rule.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace tvm_deconv

#endif  // TVM_DECONV_ERROR_HPP_
