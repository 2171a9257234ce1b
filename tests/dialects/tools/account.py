"""A tool in the shape of verl's: it adds up what is paid in."""


class Account:
    def __init__(self, config, tool_schema):
        self.config, self.tool_schema, self.sums = config, tool_schema, {}

    async def create(self, instance_id=None, **kwargs):
        instance_id = instance_id or str(len(self.sums))
        self.sums[instance_id] = int(kwargs.get("create_kwargs", {}).get("start", 0))
        return instance_id, None

    async def execute(self, instance_id, parameters, **kwargs):
        self.sums[instance_id] += int(parameters["amount"])
        return f"sum {self.sums[instance_id]}", 0.0, {}

    async def release(self, instance_id, **kwargs):
        pass
