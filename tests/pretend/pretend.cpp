// An accelerator without hardware: its memory comes from malloc, and the CPU's kernels run over that memory.
//
// PyTorch keeps the name PrivateUse1 for devices from outside, and sends their operators to what is registered here:
// factories, copies and views have a function of their own; every other operator goes to `run_on_cpu`, which refuses
// what a GPU refuses, counts, and runs the CPU's kernel.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/SDPBackend.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <mutex>
#include <set>

namespace {

using at::Device;
using at::Tensor;
using c10::IValue;
using Sizes = c10::SymIntArrayRef;
constexpr auto KIND = c10::DeviceType::PrivateUse1;
const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

const int devices = std::getenv("PRETEND_DEVICES") ? std::atoi(std::getenv("PRETEND_DEVICES")) : 1;
thread_local c10::DeviceIndex current = 0;
Device here() { return Device(KIND, current); }
bool is_ours(const Tensor& t) { return t.defined() && t.device().type() == KIND; }

// What is counted --------------------------------------------------------------------------------------------------

using Counts = c10::Dict<std::string, int64_t>;
std::mutex lock;  // a backward pass and a sampler have threads of their own
Counts operators, waits;
std::atomic<int64_t> copies_to_device = 0;

void count(Counts& counts, const std::string& name) {
  std::lock_guard<std::mutex> guard(lock);
  counts.insert_or_assign(name, (counts.contains(name) ? counts.at(name) : 0) + 1);
}

// Memory -----------------------------------------------------------------------------------------------------------

struct Memory {
  int64_t live = 0, peak = 0, total = int64_t(1) << 30;
};
std::array<Memory, 64> memories;
struct alignas(64) Block {  // stands before the bytes of each allocation
  size_t size;
  c10::DeviceIndex device;
};

struct Allocator final : c10::DeviceAllocator {
  static void release(void* bytes) {
    if (!bytes) return;
    Block* block = static_cast<Block*>(bytes) - 1;
    std::lock_guard<std::mutex> guard(lock);
    memories[block->device].live -= block->size;
    std::free(block);
  }
  at::DataPtr allocate(size_t size) override {
    std::lock_guard<std::mutex> guard(lock);
    auto& [live, peak, total] = memories[current];
    TORCH_CHECK_WITH(OutOfMemoryError, live + int64_t(size) <= total, "The pretend accelerator is out of memory. ",
                     "Tried to allocate ", size, " bytes; ", live, " of ", total, " are in use.");
    live += size;
    peak = std::max(peak, live);
    auto block = static_cast<Block*>(std::aligned_alloc(64, sizeof(Block) + (size + 63) / 64 * 64));
    *block = {size, current};
    return {block + 1, block + 1, &release, here()};
  }
  at::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> guard(lock);
    const auto& [live, _, total] = memories[device];
    return {total - live, total};
  }
  bool initialized() override { return true; }
  // Nothing is kept of what is free, there is one stream, and `clear` resets the peak.
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
};
Allocator allocator;
REGISTER_ALLOCATOR(KIND, &allocator);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  Device exchangeDevice(Device device) const override {
    Device before = here();
    uncheckedSetDevice(device);
    return before;
  }
  Device getDevice() const override { return here(); }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < devices, "There is no ", device, ": PRETEND_DEVICES is ", devices, ".");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return c10::DeviceIndex(devices); }
  void synchronizeDevice(const c10::DeviceIndex) const override { count(waits, "synchronize"); }
  // Each operator has ended when it returns: one stream is enough.
  c10::Stream getStream(Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Generator final : at::CPUGeneratorImpl {
  Generator(c10::DeviceIndex index, uint64_t seed) : at::CPUGeneratorImpl(seed) {
    device_ = Device(KIND, index < 0 ? current : index);
    key_set_ = KEYS;
  }
  Generator* clone_impl() const override {
    auto copy = new Generator(device_.index(), current_seed());
    copy->set_engine(const_cast<Generator*>(this)->engine());
    return copy;
  }
};
const at::Generator& default_generator(c10::DeviceIndex index) {
  static std::array<at::Generator, 64> generators;
  auto& generator = generators.at(index < 0 ? current : index);
  if (!generator.defined()) generator = at::make_generator<Generator>(index, c10::default_rng_seed_val);
  return generator;
}

void grow(const c10::Storage& storage, size_t size) {
  c10::DeviceGuard guard(storage.device());
  auto bytes = allocator.allocate(size);
  if (storage.nbytes()) std::memcpy(bytes.get(), storage.data(), std::min(size, storage.nbytes()));
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(bytes));
  storage.unsafeGetStorageImpl()->set_nbytes(size);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return c10::DeviceIndex(devices); }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index, c10::default_rng_seed_val);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return at::getCPUAllocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override { grow(storage, size); }
};

// Between device and CPU -------------------------------------------------------------------------------------------

// The same bytes as a tensor of the CPU.
Tensor host(const Tensor& t) {
  if (!is_ours(t)) return t;
  at::DataPtr bytes(t.storage().mutable_data(), Device(at::kCPU));
  c10::Storage storage({}, t.storage().nbytes(), std::move(bytes), at::getCPUAllocator(), /*resizable=*/true);
  c10::DispatchKeySet cpu(c10::DispatchKey::CPU);
  Tensor view = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), cpu, t.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.is_conj()) view._set_conj(true);
  if (t.is_neg()) view._set_neg(true);
  return view;
}

// A copy, in the memory of a device, of what a kernel of the CPU has returned.
Tensor to_device(const Tensor& t, Device device) {
  if (!t.defined() || !t.device().is_cpu()) return t;
  c10::DeviceGuard guard(device);
  Tensor copy = at::detail::empty_strided_generic(t.sizes(), t.strides(), &allocator, KEYS, t.scalar_type());
  host(copy).copy_(t);
  return copy;
}

// A view of a device tensor's bytes, which has the shape and dtype of a view on the CPU.
Tensor alias(const Tensor& t, const Tensor& shape) {
  c10::Storage storage = t.storage();
  Tensor view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, std::move(storage), t.key_set(), shape.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(shape.sizes(), shape.strides(), shape.storage_offset());
  return view;
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool /*non_blocking*/) {
  if (from.numel() == 0 && to.numel() == 0) return to;
  if (!is_ours(from)) copies_to_device++;
  else if (is_ours(to)) count(operators, "aten::copy_");
  else count(waits, "copy to the host");
  host(to).copy_(host(from));
  return to;
}

const Tensor& resize(const Tensor& t, Sizes sizes, std::optional<at::MemoryFormat> format) {
  auto impl = t.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(sizes));
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  size_t size = t.numel() ? (t.numel() + t.storage_offset()) * t.itemsize() : 0;
  if (t.storage().nbytes() < size) grow(t.storage(), size);
  return t;
}

Tensor& set(Tensor& t, at::Storage storage, c10::SymInt offset, Sizes size, Sizes stride) {
  auto impl = t.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset.expect_int());
  auto sizes = C10_AS_INTARRAYREF_SLOW(size), strides = C10_AS_INTARRAYREF_SLOW(stride);
  if (strides.size() == sizes.size()) impl->set_sizes_and_strides(sizes, strides);
  else impl->set_sizes_contiguous(sizes);
  return t;
}

// Every other operator ---------------------------------------------------------------------------------------------

// Calls f with each tensor of an argument or a result, and puts what f returns in its place.
template <class F>
void replace_tensors(IValue& value, F f) {
  if (value.isTensor()) {
    value = f(value.toTensor());
  } else if (value.isTensorList()) {
    auto list = value.toTensorVector();
    for (auto& t : list) t = f(t);
    value = IValue(list);
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const auto& t : value.toOptionalTensorVector()) list.push_back(t ? std::optional<Tensor>(f(*t)) : t);
    value = list;
  }
}

// Whether an argument holds indices or masks as x[...] has them, in any number.
bool are_indices(const c10::FunctionSchema& schema, size_t i) {
  return schema.arguments()[i].name() == "indices" && schema.arguments()[i].type()->kind() == c10::TypeKind::ListType;
}

// The device that a call runs on; none if neither a tensor nor a device of ours is among its arguments.
std::optional<Device> refuse_mixtures(const c10::FunctionSchema& schema, c10::ArrayRef<IValue> arguments) {
  std::optional<Device> device;
  for (IValue value : arguments) {
    if (value.isDevice() && value.toDevice().type() == KIND)
      device = value.toDevice().has_index() ? value.toDevice() : here();
    replace_tensors(value, [&](const Tensor& t) {
      if (!is_ours(t)) return t;
      TORCH_CHECK(!device || *device == t.device(), "Expected all tensors to be on the same device, but ",
                  schema.name(), " got ", *device, " and ", t.device(), ".");
      device = t.device();
      return t;
    });
  }
  for (size_t i = 0; device && i < arguments.size(); i++) {
    IValue value = arguments[i];
    // As on a GPU a number may come in a tensor of the CPU, and indices are moved.
    bool moves = are_indices(schema, i);
    replace_tensors(value, [&](const Tensor& t) {
      bool is_elsewhere = t.defined() && !is_ours(t) && t.dim() > 0;
      TORCH_CHECK(!is_elsewhere || moves, "Expected all tensors to be on the same device, but ", schema.name(),
                  " got '", schema.arguments()[i].name(), "' on ", t.device(), " beside ", *device, ".");
      if (is_elsewhere) copies_to_device++;
      return t;
    });
    if (value.isGenerator() && value.toGenerator().defined())
      TORCH_CHECK(value.toGenerator().device().type() == KIND, "Expected a generator of ", *device, ", but ",
                  schema.name(), " got one of ", value.toGenerator().device(), ".");
  }
  return device;
}

// Counts a launch, and each time that the host must know a number of the device before it can go on.
void count_call(const c10::FunctionSchema& schema, c10::ArrayRef<IValue> arguments) {
  static const std::set<std::string> sized_by_values = {
      "aten::nonzero",           "aten::masked_select",      "aten::_unique",
      "aten::_unique2",          "aten::unique_dim",         "aten::unique_consecutive",
      "aten::bincount",          "aten::equal",              "aten::repeat_interleave",
      "aten::unique_dim_consecutive"};
  const auto& name = schema.name();
  count(operators, name);
  bool is_known = name == "aten::repeat_interleave" && !arguments.back().isNone();  // its output_size is given
  if (sized_by_values.count(name) && !is_known) count(waits, name.substr(6));
  for (size_t i = 0; i < arguments.size(); i++) {
    IValue value = arguments[i];
    if (are_indices(schema, i)) replace_tensors(value, [](const Tensor& t) {
      bool is_mask = t.defined() && (t.scalar_type() == at::kBool || t.scalar_type() == at::kByte);
      if (is_mask) count(waits, "index by a mask");
      return t;
    });
  }
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto begin = stack->size() - schema.arguments().size();
  auto arguments = c10::ArrayRef<IValue>(*stack).slice(begin);
  const auto device = refuse_mixtures(schema, arguments);
  if (device) count_call(schema, arguments);

  std::vector<std::pair<Tensor, Tensor>> written;  // what the call writes into: on the CPU, and on the device
  Generator* source = nullptr;
  c10::intrusive_ptr<at::CPUGeneratorImpl> draws;
  for (size_t i = 0; device && i < schema.arguments().size(); i++) {
    auto& value = (*stack)[begin + i];
    const auto* aliased = schema.arguments()[i].alias_info();
    replace_tensors(value, [&](const Tensor& t) {
      auto view = host(t);
      if (is_ours(t) && aliased && aliased->isWrite()) written.emplace_back(view, t);
      return view;
    });
    if (value.isDevice()) value = Device(at::kCPU);
    if (schema.arguments()[i].name() == "generator") {
      bool is_given = value.isGenerator() && value.toGenerator().defined();
      const auto generator = is_given ? value.toGenerator() : default_generator(device->index());
      source = static_cast<Generator*>(generator.unsafeGetGeneratorImpl());
      draws = c10::make_intrusive<at::CPUGeneratorImpl>();
      draws->set_engine(source->engine());
      value = at::Generator(draws);
    }
  }
  // A convolution reaches a device from outside under a name that no other has.
  static const auto convolution = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  if (schema.name() == "aten::convolution_overrideable") convolution.callBoxed(stack);
  else op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  if (!device) return;
  if (source) source->set_engine(draws->engine());
  for (auto& [view, t] : written) {
    if (view.sizes() == t.sizes()) continue;  // the kernel has given an `out` tensor another size
    t.unsafeGetTensorImpl()->set_sizes_and_strides(view.sizes(), view.strides(), view.storage_offset());
    if (t.storage().nbytes() < view.storage().nbytes()) grow(t.storage(), view.storage().nbytes());
    host(t).copy_(view);
  }
  const auto results = stack->size() - schema.returns().size();
  for (size_t i = 0; i < schema.returns().size(); i++) {
    const auto* aliased = schema.returns()[i].alias_info();
    replace_tensors((*stack)[results + i], [&](const Tensor& t) {
      for (auto& [view, original] : written) if (view.is_same(t)) return original;
      TORCH_CHECK(!aliased || aliased->isWrite() || !t.defined(), schema.name(),
                  " returns a view: pretend.cpp needs a function for it.");
      return to_device(t, *device);
    });
  }
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight, Sizes stride, Sizes padding, Sizes dilation,
    bool transposed, Sizes output_padding, c10::SymInt groups, std::array<bool, 3> wanted) {
  count(operators, "aten::convolution_backward");
  std::vector<c10::SymInt> bias{transposed ? weight.sym_size(1) * groups : weight.sym_size(0)};
  auto bias_sizes = wanted[2] ? at::OptionalSymIntArrayRef(bias) : std::nullopt;
  auto [of_input, of_weight, of_bias] = at::convolution_backward_symint(
      host(grad), host(input), host(weight), bias_sizes, stride, padding, dilation, transposed, output_padding, groups,
      wanted);
  auto there = input.device();
  return {to_device(of_input, there), to_device(of_weight, there), to_device(of_bias, there)};
}

// Attention without a matrix of scores, as the fused kernels of GPUs: one launch, and one in the backward pass.
using Mask = std::optional<Tensor>;
int64_t choose_attention(const Tensor& query, const Tensor& key, const Tensor& value, const Mask& mask, double dropout,
                         bool is_causal, std::optional<double>, bool) {
  bool is_fit = query.dim() == 4 && query.numel() && key.numel() && query.size(1) % key.size(1) == 0 &&
                key.size(1) == value.size(1) && query.size(3) == value.size(3) && query.stride(3) == 1 &&
                key.stride(3) == 1 && value.stride(3) == 1 && dropout == 0;
  bool is_mask_fit = !mask || (!mask->requires_grad() && (mask->dim() == 2 || mask->dim() == 4) && !is_causal);
  return int64_t(is_fit && is_mask_fit ? at::SDPBackend::overrideable : at::SDPBackend::math);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const Mask& mask, double dropout, bool is_causal, bool,
    std::optional<double> scale) {
  TORCH_CHECK(!mask || is_ours(*mask), "Expected all tensors to be on the same device, but attention got a mask on ",
              mask->device(), " beside ", query.device(), ".");
  count(operators, "aten::scaled_dot_product_attention");
  auto [output, logsumexp] = at::_scaled_dot_product_flash_attention_for_cpu(
      host(query), host(key), host(value), dropout, is_causal, mask ? Mask(host(*mask)) : mask, scale);
  auto there = query.device();
  auto queries = query.sym_size(2), keys = key.sym_size(2);
  return {to_device(output, there), to_device(logsumexp, there), {}, {}, queries, keys, {}, {}, {}};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& mask,
    std::array<bool, 4>, const Tensor& output, const Tensor& logsumexp, const Tensor&, const Tensor&, c10::SymInt,
    c10::SymInt, double dropout, bool is_causal, const Tensor&, const Tensor&, std::optional<double> scale) {
  count(operators, "aten::scaled_dot_product_attention_backward");
  auto [of_query, of_key, of_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      host(grad), host(query), host(key), host(value), host(output), host(logsumexp), dropout, is_causal,
      mask.defined() ? Mask(host(mask)) : Mask(), scale);
  auto there = query.device();
  return {to_device(of_query, there), to_device(of_key, there), to_device(of_value, there), {}};
}

// Registration -----------------------------------------------------------------------------------------------------

torch::CppFunction boxed() { return torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>(); }
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(boxed()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  using Dtype = std::optional<at::ScalarType>;
  using Layout = std::optional<at::Layout>;
  m.impl("empty.memory_format", [](c10::IntArrayRef size, Dtype dtype, Layout, std::optional<Device> device,
                                   std::optional<bool>, std::optional<at::MemoryFormat> format) -> Tensor {
    c10::DeviceGuard guard(device.value_or(here()));
    return at::detail::empty_generic(size, &allocator, KEYS, c10::dtype_or_default(dtype), format);
  });
  m.impl("empty_strided", [](c10::IntArrayRef size, c10::IntArrayRef stride, Dtype dtype, Layout,
                             std::optional<Device> device, std::optional<bool>) -> Tensor {
    c10::DeviceGuard guard(device.value_or(here()));
    return at::detail::empty_strided_generic(size, stride, &allocator, KEYS, c10::dtype_or_default(dtype));
  });
  m.impl("_copy_from", &copy_from);
  m.impl("_local_scalar_dense", [](const Tensor& t) -> at::Scalar {
    count(waits, "item");
    return at::_local_scalar_dense(host(t));
  });
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set);
  m.impl("set_.source_Storage", [](Tensor& t, at::Storage storage) -> Tensor& {
    c10::SymInt length = int64_t(storage.nbytes() / t.itemsize());
    return set(t, std::move(storage), 0, {length}, {});
  });
  m.impl("set_.source_Tensor", [](Tensor& t, const Tensor& source) -> Tensor& {
    return set(t, source.storage(), source.sym_storage_offset(), source.sym_sizes(), source.sym_strides());
  });
  // Weights move to the device within their Parameter, as they do to a GPU.
  m.impl("_has_compatible_shallow_copy_type", [](const Tensor&, const Tensor&) { return true; });

  m.impl("as_strided", [](const Tensor& t, Sizes size, Sizes stride, std::optional<c10::SymInt> offset) -> Tensor {
    return alias(t, host(t).as_strided_symint(size, stride, offset));
  });
  m.impl("view", [](const Tensor& t, Sizes size) -> Tensor { return alias(t, host(t).view_symint(size)); });
  m.impl("view.dtype", [](const Tensor& t, at::ScalarType dtype) -> Tensor { return alias(t, host(t).view(dtype)); });
  m.impl("_reshape_alias", [](const Tensor& t, Sizes size, Sizes stride) -> Tensor {
    return alias(t, at::_reshape_alias_symint(host(t), size, stride));
  });
  m.impl("unfold", [](const Tensor& t, int64_t dim, int64_t size, int64_t step) -> Tensor {
    return alias(t, host(t).unfold(dim, size, step));
  });
  m.impl("view_as_real", [](const Tensor& t) -> Tensor { return alias(t, at::view_as_real(host(t))); });
  m.impl("view_as_complex", [](const Tensor& t) -> Tensor { return alias(t, at::view_as_complex(host(t))); });

  m.impl("convolution_overrideable", boxed());
  m.impl("convolution_backward_overrideable", &convolution_backward);

  m.impl("_scaled_dot_product_fused_attention_overrideable", &attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", &attention_backward);

  m.impl("index.Tensor", boxed());  // PyTorch would turn its masks into indices first

  // PyTorch would put these together from smaller operators. A GPU has a kernel for each: one launch, not many.
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    auto op = c10::Dispatcher::singleton().findSchema(name);
    bool is_composite = op && op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd);
    if (!is_composite || name.name.rfind("aten::", 0)) continue;
    bool is_foreach = name.name.rfind("aten::_foreach_", 0) == 0 && name.name != "aten::_foreach_copy_";
    if (is_foreach || op->hasKernelForDispatchKey(c10::DispatchKey::CPU))
      m.impl(c10::toString(name).c_str(), boxed());
  }
}

// A copy handles a conjugated or negated source itself. Unless it says so, PyTorch resolves the source by a clone, the
// clone by a copy, and so on until the stack is full.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {  // the lists of CUDA
  using namespace at;
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FULL(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FULL_BY_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FULL)
  AT_FORALL_FP32_SET_OPT_DTYPE(FULL_BY_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(PROMOTE)
}

// What torch_musa/__init__.py calls as torch.ops.pretend.
TORCH_LIBRARY(pretend, m) {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  m.def("operators", [] { return operators.copy(); });
  m.def("waits", [] { return waits.copy(); });
  m.def("copies_to_device", [] { return copies_to_device.load(); });
  m.def("clear", [] {
    std::lock_guard<std::mutex> guard(lock);
    operators.clear();
    waits.clear();
    copies_to_device = 0;
    for (auto& memory : memories) memory.peak = memory.live;
  });
  m.def("device_count", [] { return int64_t(devices); });
  m.def("memory", [](int64_t index) {
    const auto& [live, peak, total] = memories.at(index);
    return std::vector<int64_t>{live, peak, total};
  });
  m.def("set_total_memory", [](int64_t index, int64_t size) { memories.at(index).total = size; });
  m.def("default_generator", [](int64_t index) -> at::Generator { return default_generator(index); });
}

}  // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &choose_attention);
}
