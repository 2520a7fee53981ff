// The stand-in device: an accelerator over the CPU's memory that refuses what CUDA refuses.
// What it is for, and what about it is not CUDA's, stands in `tests/standin/__init__.py`.

#include <ATen/EmptyTensor.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/OpMathType.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::IValue;
using c10::Stream;
using c10::StreamId;
using torch::jit::Stack;

constexpr auto kHere = c10::DeviceType::PrivateUse1;
constexpr size_t kAlignment = 512;  // of the addresses that CUDA's allocator gives
// No address of a process has this bit, so that the CPU cannot touch what lies here by mistake.
constexpr uintptr_t kElsewhere = uintptr_t{1} << 62;

// ---------------------------------------------------------------- devices and memory

DeviceIndex device_count() {
  static const DeviceIndex count = [] {
    const char* asked = std::getenv("STANDIN_DEVICES");
    return static_cast<DeviceIndex>(asked ? std::atoi(asked) : 2);
  }();
  return count;
}

thread_local DeviceIndex current_device = 0;
thread_local std::map<DeviceIndex, StreamId> current_streams;

void* real(const void* elsewhere) {
  return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(elsewhere) & ~kElsewhere);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    Device device(kHere, current_device);
    if (nbytes == 0) return {nullptr, device};
    size_t whole = (nbytes + kAlignment - 1) / kAlignment * kAlignment;
    void* memory = std::aligned_alloc(kAlignment, whole);
    TORCH_CHECK(memory, "out of memory: expected ", whole, " bytes for ", device);
    std::memset(memory, 0xFF, whole);  // a NaN to every dtype that has one
    void* told = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(memory) | kElsewhere);
    return {told, memory, &std::free, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t count) const override {
    std::memcpy(real(to), real(from), count);
  }
};
DeviceAllocator device_allocator;
REGISTER_ALLOCATOR(kHere, &device_allocator);

std::mutex pinned_mutex;
std::map<uintptr_t, size_t> pinned;

struct PinnedAllocator final : c10::Allocator {
  static void release(void* memory) {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned.erase(reinterpret_cast<uintptr_t>(memory));
    std::free(memory);
  }
  c10::DataPtr allocate(size_t nbytes) override {
    size_t whole = (std::max<size_t>(nbytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
    void* memory = std::aligned_alloc(kAlignment, whole);
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned[reinterpret_cast<uintptr_t>(memory)] = whole;
    return {memory, memory, &release, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t count) const override {
    std::memcpy(to, from, count);
  }
};
PinnedAllocator pinned_allocator;

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto after = pinned.upper_bound(reinterpret_cast<uintptr_t>(data));
  if (after == pinned.begin()) return false;
  auto at = std::prev(after);
  return reinterpret_cast<uintptr_t>(data) < at->first + at->second;
}

// ---------------------------------------------------------------- streams and events

using Work = std::function<void()>;
using Where = std::pair<DeviceIndex, StreamId>;

// What was issued to a stream and is not done: work of the device, and what it writes for the host.
struct Queue {
  uint64_t issued = 0;
  std::deque<std::pair<uint64_t, Work>> work;
  std::deque<std::pair<uint64_t, Work>> landings;
};

struct Event {
  Where where;
  uint64_t issued = 0;
};

std::recursive_mutex queues_mutex;
std::map<Where, Queue> queues;
std::atomic<StreamId> next_stream{1};

void run_until(std::deque<std::pair<uint64_t, Work>>& queue, uint64_t last) {
  c10::InferenceMode later;  // what was issued within inference mode may be done after it
  while (!queue.empty() && queue.front().first <= last) {
    auto work = std::move(queue.front().second);
    queue.pop_front();
    work();
  }
}

// Let a stream get on to a point of it, so that other streams see what it wrote.
void get_on(const Where& where, uint64_t last = UINT64_MAX) {
  std::lock_guard<std::recursive_mutex> lock(queues_mutex);
  run_until(queues[where].work, last);
}

// The same for the host: what is on its way to pinned memory lands.
void finish(const Where& where, uint64_t last = UINT64_MAX) {
  std::lock_guard<std::recursive_mutex> lock(queues_mutex);
  auto& queue = queues[where];
  run_until(queue.work, last);
  run_until(queue.landings, last);
}

void finish_device(DeviceIndex device) {
  std::lock_guard<std::recursive_mutex> lock(queues_mutex);
  for (auto& [where, queue] : queues)
    if (where.first == device) finish(where);
}

bool is_done(const Where& where, uint64_t last = UINT64_MAX) {
  std::lock_guard<std::recursive_mutex> lock(queues_mutex);
  auto waits = [last](auto& queue) { return !queue.empty() && queue.front().first <= last; };
  return !waits(queues[where].work) && !waits(queues[where].landings);
}

void issue(const Where& where, Work work) {
  std::lock_guard<std::recursive_mutex> lock(queues_mutex);
  auto& queue = queues[where];
  queue.work.emplace_back(++queue.issued, std::move(work));
}

void issue_landing(const Where& where, Work work) {
  std::lock_guard<std::recursive_mutex> lock(queues_mutex);
  auto& queue = queues[where];
  queue.landings.emplace_back(++queue.issued, std::move(work));
}

Where here(DeviceIndex device) { return {device, current_streams[device]}; }
Where where_of(const Stream& stream) { return {stream.device_index(), stream.id()}; }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kHere; }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return {kHere, current_device}; }
  void setDevice(Device device) const override {
    TORCH_CHECK(
        device.index() < device_count(), "invalid device ordinal ", device, "; there are ",
        static_cast<int>(device_count()));
    if (device.index() >= 0) current_device = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  Device known(Device device) const { return device.has_index() ? device : getDevice(); }
  Stream getStream(Device device) const override {
    device = known(device);
    return Stream(Stream::UNSAFE, device, current_streams[device.index()]);
  }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::DEFAULT, known(device));
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device); }
  Stream getNewStream(Device device, int = 0) const override {
    return Stream(Stream::UNSAFE, known(device), next_stream++);
  }
  Stream exchangeStream(Stream stream) const override {
    Stream before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag)
      const override {
    std::lock_guard<std::recursive_mutex> lock(queues_mutex);
    if (!*event) *event = new Event;
    auto where = where_of(stream);
    *static_cast<Event*>(*event) = {where, queues[where].issued};
  }
  void block(void* event, const Stream&) const override {
    auto at = static_cast<Event*>(event);
    if (at) get_on(at->where, at->issued);
  }
  bool queryEvent(void* event) const override {
    auto at = static_cast<Event*>(event);
    if (!at || is_done(at->where, at->issued)) return true;
    finish(at->where, at->issued);  // who asks again hears that it is done
    return false;
  }
  void synchronizeEvent(void* event) const override {
    auto at = static_cast<Event*>(event);
    if (at) finish(at->where, at->issued);
  }
  bool queryStream(const Stream& stream) const override {
    if (is_done(where_of(stream))) return true;
    finish(where_of(stream));
    return false;
  }
  void synchronizeStream(const Stream& stream) const override { finish(where_of(stream)); }
  void synchronizeDevice(const DeviceIndex device) const override {
    finish_device(device < 0 ? current_device : device);
  }
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 0.0; }
  DeviceIndex deviceCount() const noexcept override { return device_count(); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---------------------------------------------------------------- random numbers

// The CPU's generator behind it, with another state: one seed gives CPU and device other numbers.
constexpr uint64_t kOtherSeed = 0x5F356495;

struct Randomness final : c10::GeneratorImpl {
  explicit Randomness(DeviceIndex device)
      : Randomness(device, at::detail::createCPUGenerator()) {
    set_current_seed(c10::default_rng_seed_val);
  }
  Randomness(DeviceIndex device, at::Generator inner)
      : GeneratorImpl(Device(kHere, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(std::move(inner)) {}
  void set_current_seed(uint64_t seed) override {
    inner.set_current_seed(seed ^ kOtherSeed);
  }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "no offsets on the stand-in"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "no offsets on the stand-in"); }
  uint64_t current_seed() const override { return inner.current_seed() ^ kOtherSeed; }
  uint64_t seed() override { return inner.seed() ^ kOtherSeed; }
  void set_state(const c10::TensorImpl& state) override { impl().set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return impl().get_state(); }
  GeneratorImpl* clone_impl() const override {
    return new Randomness(device().index(), inner.clone());
  }
  c10::GeneratorImpl& impl() const { return *inner.unsafeGetGeneratorImpl(); }

  at::Generator inner;
};

const at::Generator& default_generator(DeviceIndex device) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (DeviceIndex index = 0; index < device_count(); ++index)
      made.push_back(at::make_generator<Randomness>(index));
    return made;
  }();
  return all.at(device < 0 ? current_device : device);
}

at::Generator inner_of(const at::Generator& generator) {
  TORCH_CHECK(
      generator.device().type() == kHere, "Expected a '", Device(kHere),
      "' generator but found a '", generator.device(), "' one");
  return static_cast<Randomness*>(generator.unsafeGetGeneratorImpl())->inner;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<Randomness>(device < 0 ? current_device : device);
  }
  Device getDeviceFromPtr(void*) const override { return {kHere, current_device}; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  DeviceIndex deviceCount() const override { return device_count(); }
  void setCurrentDevice(DeviceIndex device) const override {
    Guard().setDevice(Device(kHere, device));
  }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return Guard().exchangeDevice(Device(kHere, device)).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    auto impl = storage.unsafeGetStorageImpl();
    c10::DeviceGuard guard(storage.device());
    auto fresh = device_allocator.allocate(nbytes);
    if (auto kept = std::min(nbytes, storage.nbytes()))
      std::memcpy(real(fresh.get()), real(storage.data()), kept);
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(nbytes);
  }
};

// ---------------------------------------------------------------- operations

bool is_here(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kHere; }

// The same elements as the CPU sees them, at their real address.
Tensor on_cpu(const Tensor& tensor) {
  auto& storage = tensor.storage();
  auto nbytes = storage.nbytes();
  c10::Storage same =
      nbytes == 0
          ? c10::Storage(c10::Storage::use_byte_size_t(), 0, c10::GetAllocator(c10::kCPU), true)
          : c10::Storage(
                c10::Storage::use_byte_size_t(), nbytes,
                c10::DataPtr(real(storage.data()), Device(c10::kCPU)), nullptr, false);
  auto alias = at::detail::make_tensor<c10::TensorImpl>(
      std::move(same), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto impl = alias.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return alias;
}

// What an operation has computed on the CPU, as a new tensor of the device.
Tensor brought(const Tensor& computed, Device device) {
  if (!computed.defined()) return computed;
  auto made = at::empty_strided(computed.sizes(), computed.strides(), computed.options().device(device));
  if (made.numel()) on_cpu(made).copy_(computed);
  return made;
}

struct Call {
  const c10::OperatorHandle& op;
  Device device{c10::kCPU};
  bool takes_cpu_scalars;
  std::vector<Tensor> originals;  // of the device, with their aliases
  std::vector<Tensor> aliases;

  explicit Call(const c10::OperatorHandle& op)
      : op(op),
        // torch.equal is called pointwise, and yet CUDA takes no scalar of the CPU there.
        takes_cpu_scalars(
            (op.hasTag(at::Tag::pointwise) && name() != "aten::equal") ||
            takes_scalars_untagged()) {}

  std::string name() const { return op.operator_name().name; }

  bool takes_scalars_untagged() const {
    static const std::set<std::string> names{
        "aten::fill_", "aten::floor_divide", "aten::masked_fill", "aten::masked_fill_", "aten::index_put",
        "aten::index_put_", "aten::_index_put_impl_", "aten::lerp_", "aten::where",
        "aten::_local_scalar_dense"};
    return names.count(name()) != 0 && name().rfind("aten::_foreach", 0) != 0;
  }

  bool takes_cpu_indices() const {
    static const std::set<std::string> names{
        "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_",
        "aten::_unsafe_index", "aten::_unsafe_index_put"};
    return names.count(name()) != 0;
  }

  void meet(const Tensor& tensor) {
    if (!is_here(tensor)) return;
    if (device.type() != kHere) device = tensor.device();
    TORCH_CHECK(
        device == tensor.device(), "Expected all tensors to be on the same device, but found at ",
        "least two devices, ", device, " and ", tensor.device(), "! (in ", name(), ")");
  }

  Tensor alias(const Tensor& tensor, bool is_index = false) {
    if (!tensor.defined()) return tensor;
    if (!is_here(tensor)) {
      bool is_number = tensor.unsafeGetTensorImpl()->is_wrapped_number();
      bool is_scalar = is_number || (takes_cpu_scalars && tensor.dim() == 0);
      TORCH_CHECK(
          device.type() != kHere || is_scalar || (is_index && takes_cpu_indices()),
          "Expected all tensors to be on the same device, but found at least two devices, ",
          device, " and ", tensor.device(), "! (in ", name(), ")");
      return tensor;
    }
    for (size_t at = 0; at < originals.size(); ++at)
      if (originals[at].is_same(tensor)) return aliases[at];
    originals.push_back(tensor);
    aliases.push_back(on_cpu(tensor));
    return aliases.back();
  }

  // The tensor of the device that an operation gave back under the name of its alias.
  Tensor original(const Tensor& given) {
    for (size_t at = 0; at < aliases.size(); ++at)
      if (aliases[at].is_same(given)) return originals[at];
    if (given.defined() && given.numel())
      for (const auto& alias : aliases)
        TORCH_CHECK(
            !alias.storage().data() || alias.storage().data() != given.storage().data(),
            "the stand-in device has no kernel for the view ", name());
    return brought(given, device);
  }

  // An out= tensor without elements may have got some.
  void settle_sizes() {
    for (size_t at = 0; at < aliases.size(); ++at) {
      if (originals[at].sizes() == aliases[at].sizes()) continue;
      originals[at].resize_(aliases[at].sizes());
      if (aliases[at].numel()) on_cpu(originals[at]).copy_(aliases[at]);
    }
  }
};

void on_the_cpu(const c10::OperatorHandle& op, Stack& stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
}

// The same for an operation that draws from the CPU's default generator, with the device's state.
void on_the_cpu_drawing(const c10::OperatorHandle& op, Stack& stack, at::Generator of_device) {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  auto kept = generator.get_state();
  generator.set_state(of_device.get_state());
  on_the_cpu(op, stack);
  of_device.set_state(generator.get_state());
  generator.set_state(kept);
}

// What CUDA makes of a division by a number of the CPU: a product with its rounded reciprocal.
bool divides_by_number(Call& call, const Stack& arguments) {
  if (call.name() != "aten::div" && call.name() != "aten::div_") return false;
  const auto& other = arguments.at(1);
  if (!arguments.at(0).isTensor() || !other.isTensor() || !is_here(arguments.at(0).toTensor()))
    return false;
  if (is_here(other.toTensor()) || other.toTensor().dim() != 0) return false;
  for (size_t at = 2; at < arguments.size(); ++at)
    if (arguments[at].isString()) return false;  // a rounding mode
  return arguments.back().isTensor() && at::isFloatingType(arguments.back().toTensor().scalar_type());
}

void multiply_with_reciprocal(const Tensor& self, const Tensor& other, const Tensor& out) {
  bool wide = self.scalar_type() == at::kDouble || out.scalar_type() == at::kDouble;
  auto dtype = wide ? at::kDouble : at::kFloat;
  double by = other.item<double>();
  auto inverse = at::scalar_tensor(1.0 / by, dtype);
  out.copy_(at::mul(self.to(dtype), inverse));
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const auto count = schema.arguments().size();
  const size_t begin = stack->size() - count;
  Call call(op);
  Stack arguments(stack->begin() + begin, stack->end());

  for (const auto& value : arguments) {
    if (value.isTensor()) call.meet(value.toTensor());
    else if (value.isTensorList()) for (const auto& each : value.toTensorVector()) call.meet(each);
    else if (value.isOptionalTensorList())
      for (const std::optional<Tensor>& each : value.toOptionalTensorList()) if (each) call.meet(*each);
    else if (value.isDevice() && value.toDevice().type() == kHere && call.device.type() != kHere)
      call.device = Guard().known(value.toDevice());
  }
  if (call.device.type() != kHere) call.device = Guard().getDevice();
  c10::DeviceGuard guard(call.device);

  bool draws = op.hasTag(at::Tag::nondeterministic_seeded);
  bool has_generator = false;
  Stack given;
  given.reserve(count);
  for (size_t at = 0; at < count; ++at) {
    const auto& value = arguments[at];
    if (value.isTensor()) {
      given.emplace_back(call.alias(value.toTensor()));
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const auto& each : value.toTensorVector()) list.push_back(call.alias(each));
      given.emplace_back(std::move(list));
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& each : value.toOptionalTensorList())
        list.push_back(each ? std::optional<Tensor>(call.alias(*each, true)) : std::nullopt);
      given.emplace_back(std::move(list));
    } else if (value.isDevice()) {
      given.emplace_back(Device(c10::kCPU));
    } else if (schema.arguments()[at].name() == "generator") {
      has_generator = true;
      given.emplace_back(inner_of(
          value.isNone() ? default_generator(call.device.index()) : value.toGenerator()));
    } else {
      given.push_back(value);
    }
  }
  draws &= !has_generator;

  Work work;
  if (divides_by_number(call, arguments)) {
    Tensor self = given[0].toTensor(), other = given[1].toTensor(), out = given.back().toTensor();
    work = [self, other, out] { multiply_with_reciprocal(self, other, out); };
  }

  const auto where = here(call.device.index());
  // Everything that it gives back was handed in, and so is there before it is done.
  bool only_writes = !draws && (!schema.returns().empty() || schema.is_mutable());
  for (const auto& each : schema.returns())
    only_writes &= each.alias_info() && each.alias_info()->isWrite();
  for (const auto& each : call.originals) only_writes &= each.storage().nbytes() != 0;
  if (only_writes && where.second != 0) {
    if (!work) work = [op, given]() mutable { on_the_cpu(op, given); };
    issue(where, [work, kept = call.originals] { work(); });
    stack->erase(stack->begin() + begin, stack->end());
    for (const auto& each : schema.returns())
      for (size_t at = 0; at < count; ++at) {
        auto info = schema.arguments()[at].alias_info();
        if (info && info->isWrite() && info->beforeSets() == each.alias_info()->beforeSets()) {
          stack->push_back(arguments[at]);
          break;
        }
      }
    return;
  }

  get_on(where);
  if (work) {
    work();
    stack->erase(stack->begin() + begin, stack->end());
    stack->push_back(arguments.back());
    return;
  }
  if (draws) on_the_cpu_drawing(op, given, inner_of(default_generator(call.device.index())));
  else on_the_cpu(op, given);
  call.settle_sizes();
  stack->erase(stack->begin() + begin, stack->end());
  for (auto& value : given) {
    if (value.isTensor()) {
      stack->emplace_back(call.original(value.toTensor()));
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const auto& each : value.toTensorVector()) list.push_back(call.original(each));
      stack->emplace_back(std::move(list));
    } else {
      stack->push_back(value);
    }
  }
}

Tensor empty_strided(
    c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<at::ScalarType> dtype,
    std::optional<c10::Layout>, std::optional<Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(Guard().known(device.value_or(Device(kHere))));
  return at::detail::empty_strided_generic(
      sizes, strides, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

Tensor empty(
    c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<Device> device, std::optional<bool> pin,
    std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(Guard().known(device.value_or(Device(kHere))));
  return at::detail::empty_generic(
      sizes, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

const Tensor& resize_(
    const Tensor& self, c10::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  auto impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  auto needed = (self.storage_offset() + self.numel()) * self.itemsize();
  if (needed > self.storage().nbytes()) Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  return self;
}

Tensor& copy_(Tensor& self, const Tensor& src, bool non_blocking) {
  auto device = is_here(self) ? self.device() : src.device();
  c10::DeviceGuard guard(device);
  auto where = here(device.index());
  if (is_here(self) && is_here(src)) {
    if (self.device() != src.device()) get_on(here(src.device().index()));
    Tensor to = on_cpu(self), from = on_cpu(src);
    auto work = [=, kept = std::make_pair(self, src)]() { Tensor(to).copy_(from); };
    if (where.second != 0) issue(where, work);
    else get_on(where), work();
  } else if (is_here(self)) {
    Tensor to = on_cpu(self);
    bool reads_late = non_blocking && is_pinned(src.storage().data());
    auto work = [=, kept = self]() { Tensor(to).copy_(src); };
    if (reads_late) issue(where, work);
    else get_on(where), work();
  } else {
    get_on(where);
    Tensor from = on_cpu(src), to = self;
    if (non_blocking && is_pinned(self.storage().data())) {
      Tensor read = at::empty_like(from);
      read.copy_(from);
      issue_landing(where, [=]() { Tensor(to).copy_(read); });
    } else {
      to.copy_(from);
    }
  }
  return self;
}

Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  Tensor to = dst;
  return copy_(to, self, non_blocking);
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  dst.resize_(self.sizes());
  return copy_from(self, dst, false);
}

Tensor as_strided(
    const Tensor& self, c10::IntArrayRef sizes, c10::IntArrayRef strides,
    std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, sizes, strides, offset);
}

Tensor& set_storage(
    Tensor& self, c10::Storage source, int64_t offset, c10::IntArrayRef sizes,
    c10::IntArrayRef strides) {
  return at::native::set_storage_cpu_(self, std::move(source), offset, sizes, strides);
}

Tensor& set_source(Tensor& self, c10::Storage source) {
  int64_t size = source.nbytes() / self.itemsize();
  return self.set_(std::move(source), 0, {size}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return self.set_(source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_nothing(Tensor& self) {
  c10::DeviceGuard guard(self.device());
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, &device_allocator, true);
  return self.set_(std::move(none), 0, {0}, {});
}

// A convolution has no kernel of its own for devices of others, and no name for what is missing.
Tensor convolution(
    const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
    c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
    c10::IntArrayRef output_padding, int64_t groups) {
  get_on(here(input.device().index()));
  for (const auto& each : {weight, bias && bias->defined() ? *bias : weight})
    TORCH_CHECK(
        each.device() == input.device(), "Expected all tensors to be on the same device, but ",
        "found at least two devices, ", input.device(), " and ", each.device(), "!");
  bool adds = bias && bias->defined();
  auto added = adds ? std::optional<Tensor>(on_cpu(*bias)) : std::nullopt;
  return brought(
      at::convolution(
          on_cpu(input), on_cpu(weight), added, stride, padding, dilation, transposed,
          output_padding, groups),
      input.device());
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
    c10::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  get_on(here(input.device().index()));
  std::vector<int64_t> bias_sizes{grad.size(1)};
  auto [of_input, of_weight, of_bias] = at::convolution_backward(
      on_cpu(grad), on_cpu(input), on_cpu(weight), bias_sizes, stride, padding, dilation,
      transposed, output_padding, groups, mask);
  auto device = input.device();
  auto own = [device](const Tensor& each) { return each.defined() ? brought(each, device) : each; };
  return {own(of_input), own(of_weight), own(of_bias)};
}

void record_stream(Tensor&, Stream) {}  // what is queued keeps its tensors

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize_);
  m.impl("copy_", &copy_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("as_strided", &as_strided);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_source);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("record_stream", &record_stream);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  // CUDA's own kernels for lists divide by a number, and do not multiply with its reciprocal.
  for (const char* name :
       {"_foreach_div.Scalar", "_foreach_div_.Scalar", "_foreach_div.ScalarList",
        "_foreach_div_.ScalarList"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  // With out= these resize what the generic kernel makes for them, and warn of it.
  m.impl("mse_loss", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("smooth_l1_loss", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("huber_loss", torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

struct Registered {
  Registered() { at::RegisterPrivateUse1HooksInterface(new Hooks); }
} registered;

void set_device(int64_t device) { Guard().setDevice(Device(kHere, device)); }
int64_t get_device() { return current_device; }
int64_t count_devices() { return device_count(); }
at::Generator get_generator(int64_t device) {
  return default_generator(static_cast<DeviceIndex>(device));
}

TORCH_LIBRARY(standin, m) {
  m.def("set_device(int device) -> ()");
  m.def("get_device() -> int");
  m.def("count_devices() -> int");
  m.def("get_generator(int device) -> Generator?");
  m.impl("set_device", c10::DispatchKey::CompositeExplicitAutograd, &set_device);
  m.impl("get_device", c10::DispatchKey::CompositeExplicitAutograd, &get_device);
  m.impl("count_devices", c10::DispatchKey::CompositeExplicitAutograd, &count_devices);
  m.impl("get_generator", c10::DispatchKey::CompositeExplicitAutograd, &get_generator);
}

}  // namespace
