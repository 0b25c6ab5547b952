// The operator of OpenVINO that computes a layer without Python. A node names its layer by a number (../runtime/layers.h)
// while it is made, and then keeps what belongs to the layer, as do the nodes that OpenVINO makes from it.
#include <algorithm>
#include <memory>

#include <openvino/core/op_extension.hpp>
#include <openvino/op/op.hpp>

#include "../runtime/layers.h"

// Whose threads compute: that of threads.c, or none.
extern "C" TVM_DECONV_EXPORT const struct host *tvm_deconv_host = nullptr;

namespace tvm_deconv {

class Deconv : public ov::op::Op {
 public:
  OPENVINO_OP("Deconv", "tvm_deconv");

  Deconv() = default;
  Deconv(const ov::OutputVector &inputs, const Deconv &other)
      : Op(inputs), number_(other.number_), layer_(other.layer_), type_(other.type_) {
    constructor_validate_and_infer_types();
  }

  bool visit_attributes(ov::AttributeVisitor &visitor) override {
    visitor.on_attribute("layer", number_);
    if (!layer_) {
      char message[MESSAGE_BYTES];
      layer_.reset(tvm_deconv_find_layer(number_, message), [](facts *found) {
        if (found) tvm_deconv_release_layer(found);
      });
      OPENVINO_ASSERT(layer_, message);
      type_ = get_input_element_type(0);
    }
    return true;
  }

  void validate_and_infer_types() override {
    const ov::PartialShape &data = get_input_partial_shape(0);
    ov::PartialShape made = ov::PartialShape::dynamic(layer_->rank);
    for (int axis = 0; axis < layer_->rank; ++axis) {
      if (layer_->data[axis] >= 0) made[axis] = layer_->offset[axis];
      else if (data.rank().is_static()) made[axis] = extent(axis, data[axis]);
    }
    set_output_type(0, get_input_element_type(0), made);
  }

  std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector &inputs) const override {
    return std::make_shared<Deconv>(inputs, *this);
  }

  bool has_evaluate() const override { return true; }

  bool evaluate(ov::TensorVector &outputs, const ov::TensorVector &inputs) const override {
    const ov::Tensor &data = inputs[0];
    ov::Tensor &out = outputs[0];
    const ov::Shape given = data.get_shape();
    int64_t extents[2][MOST_AXES];
    char message[MESSAGE_BYTES];
    std::copy_n(given.begin(), std::min<size_t>(given.size(), MOST_AXES), extents[0]);
    if (tvm_deconv_fit(layer_.get(), given.size(), extents[0], extents[1], message)) OPENVINO_THROW(message);
    const ov::Shape made(extents[1], extents[1] + layer_->rank);
    if (out.get_shape() != made) out.set_shape(made);
    OPENVINO_ASSERT(data.get_element_type() == type_ && out.get_element_type() == type_, "the layer computes ", type_,
                    ", not ", data.get_element_type());
    const array source = {const_cast<void *>(data.data()), extents[0]}; // which the layer reads only
    const array target = {out.data(), extents[1]};
    if (tvm_deconv_run(layer_.get(), tvm_deconv_host, source, target, message)) OPENVINO_THROW(message);
    return true;
  }

 private:
  // The output's extent along an axis for the data's, which may be a range.
  ov::Dimension extent(int axis, const ov::Dimension &data) const {
    const int64_t factor = layer_->factor[axis], offset = layer_->offset[axis], least = axis > 1;
    const int64_t from = std::max<int64_t>(factor * std::max<int64_t>(data.get_min_length(), least) + offset, 0);
    return {from, data.get_max_length() == -1 ? -1 : factor * data.get_max_length() + offset};
  }

  int64_t number_ = 0;
  std::shared_ptr<facts> layer_;
  ov::element::Type type_; // of data and output
};

}  // namespace tvm_deconv

OPENVINO_CREATE_EXTENSIONS(std::vector<ov::Extension::Ptr>({std::make_shared<ov::OpExtension<tvm_deconv::Deconv>>()}));
