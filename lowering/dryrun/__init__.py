"""Lowering for Ascend on any machine: traced through the real torch_npu, with nothing of CANN installed.

torch_npu without CANN breaks `import torch`, so it is never loaded here: a process of its own (`child`) loads the
fetched wheel (`wheel`) beside stand-ins for the CANN libraries (`stubs`), and answers requests (`process`). Its
operators' schemas and shape functions are then the real ones; `versions` compares other versions by their schemas.
Nothing is fetched or started before `process.lower` or `wheel.fetch` is called.
"""
