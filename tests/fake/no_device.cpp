// What a CPU build of torch lacks before autograd follows tensors whose device is "cuda" and that hold no values: a guard
// for that device, hooks that say it exists, and the answer that it is the accelerator. Loaded before torch.
#include <optional>

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

const c10::Device the_device(c10::DeviceType::CUDA, 0);
const c10::Stream the_stream(c10::Stream::DEFAULT, the_device);

struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device exchangeDevice(c10::Device) const override { return the_device; }
  c10::Device getDevice() const override { return the_device; }
  c10::Stream getStream(c10::Device) const noexcept override { return the_stream; }
  c10::Stream getDefaultStream(c10::Device) const override { return the_stream; }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return the_stream; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void*) const override { return false; }
};

}  // namespace

namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)
}

namespace at::accelerator {
__attribute__((visibility("default"))) std::optional<c10::DeviceType> getAccelerator(bool) {
  return c10::DeviceType::CUDA;
}
}  // namespace at::accelerator

extern "C" void install() {
  static const Guard guard;
  c10::impl::device_guard_impl_registry[static_cast<std::size_t>(c10::DeviceType::CUDA)].store(&guard);
}
